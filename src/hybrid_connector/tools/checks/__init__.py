"""What ``doctor`` looks at: each module one side of the matter, each function one check and its findings."""
