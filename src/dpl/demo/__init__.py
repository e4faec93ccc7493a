"""The demonstration: a small network trained on MNIST meets UCI digits, offline, on any machine."""
