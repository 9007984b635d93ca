"""AdaptiveModel, the contract that every method keeps, with its state, hyperparameters and registry.

A method subclasses :class:`AdaptiveModel`, stores its hyperparameters under their own names and implements
:meth:`~AdaptiveModel.adapt_step`. Checks, modes, randomness, reset, fork, saving and moving between devices come from
the base class, on one condition: *state lives only in submodules, persistent buffers of fixed size, the optimizer and
counters declared with* :meth:`~AdaptiveModel.register_counter`. :func:`ctta.testing.check_method` verifies it.

It is built in three layers, each with its own part of the state:

1. :class:`MethodNetworks`: the frozen source, and what a constructor builds from it;
2. :class:`MethodUpdates`: the optimizer, policies, counters and random draws of a step;
3. :class:`AdaptiveModel`: what users call, and what a method implements.
"""
