"""The demonstration: a small network trained on MNIST adapts to UCI digits, offline."""
