"""What survivors of a rank's death do, and how ranks come back: who is left, new memory, experts, old CUDA graphs."""
