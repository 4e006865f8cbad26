"""Stands for nvidia-cutlass-dsl, which is looked for and not called."""
