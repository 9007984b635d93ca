"""The constants of VANE beside its keywords; docs/results/vane.md says, section by section, how they were chosen."""

from ctta.views import Views, geometric_views

# Statistics of BatchNorm ("One fraction for all layers")

#: How far the layers of a network go from the source's statistics to those of a stream that is certainly shifted: the
#: root of the sum of the squared fractions.
LARGEST_MOVE = 1.6
#: How many images of the stream count as much as the source, whatever their distance.
SOURCE_SIZE = 8

# Outliers ("Outliers")

#: Images whose values in the first BatchNorm are further than this from the source's mean, in its deviations, are
#: answered by the source and change nothing. That is a broken sensor: a corruption stays below 2 at severity 5.
MAX_DEVIATION = 10.0

# New domains ("New domains")

#: Images that the appearance of a domain, and its class frequencies, average over.
DOMAIN_MEMORY = 1000
#: Images that the recent appearance averages over, and the fewest of a domain before it can end.
RECENT_MEMORY = 16
#: Lower bound of the variance between images: of means relative to the variance of pixels, of logarithms as it is.
MIN_VARIANCE = 0.1
#: Added to the variance of pixels before the logarithm.
TINY_VARIANCE = 1e-4
#: Predictions that class frequencies average over if changes of the domain are not detected.
UNKNOWN_DOMAINS_MEMORY = 200

# Views ("Views", "Mirrored images")

#: The views of images, and those of networks that segment.
MOVED: Views = geometric_views(4)
FLIP: Views = geometric_views(1)
#: Predictions that are surer than this are compared. Others differ between views whatever the images show.
MIN_MIRROR_CONFIDENCE = 0.9
#: The fraction of them that mirrored images must agree with.
MIN_MIRROR_AGREEMENT = 0.75
#: How many compared predictions count.
MIRROR_MEMORY = 200
#: How many compared predictions, all of which agree, are assumed at the start.
FIRST_MIRROR_COUNT = 20

# Labels that repeat ("Label chain", "Hidden labels")

#: How many transitions the estimate of the stickiness remembers.
TRANSITION_MEMORY = 100
#: Transitions that the estimate starts from: one that stays, and five that do not.
PRIOR_STAYS, PRIOR_MOVES = 1.0, 5.0
#: How many predictions, evenly over the classes, the class frequencies of a domain start from.
FIRST_CLASS_COUNT = 100
#: The fraction of the uniform distribution in the class frequencies, so that none is zero.
SMOOTHING = 0.1
#: Predictions under a shift are overconfident, so their logits are divided by this before they count as evidence.
TEMPERATURE = 2.0
#: The probability that a prediction of the source has nothing to do with its image.
UNINFORMATIVE_PROBABILITY = 0.3
#: Batch statistics of few classes hide these classes. Assume so if runs of a label are this many times as long for the
#: source as for the student.
HIDDEN_RUN_RATIO = 2.5

# Learning ("Learning")

#: Of the class frequencies that predictions are kept diverse by, as in SLR.
FREQUENCY_MOMENTUM = 0.9
