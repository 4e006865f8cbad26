"""Small helpers that know nothing of experts: deprecated names, files, `torch.compile`, progress bars."""
