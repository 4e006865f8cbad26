"""Small helpers that know nothing of experts: files, `torch.compile`, progress bars."""
