"""What several methods share: memories of past images, and contrastive losses with their projector."""
