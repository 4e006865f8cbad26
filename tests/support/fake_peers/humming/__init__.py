"""Humming as `launch.research.peers` calls it."""
