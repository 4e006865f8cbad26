"""What a layer did and where its time went: counters of steps, and named phases for profilers."""
