"""What several methods share: which network predicts, memories of past images, and contrasts with their projector."""
