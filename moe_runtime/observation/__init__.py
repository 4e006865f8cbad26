"""What a layer did and where its time went: counters, waits by peer, recorded routes, and phases for profilers."""
