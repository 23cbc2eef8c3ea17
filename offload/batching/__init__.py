"""Several sequences decoded together: their forward passes run as one, which reads the weights once."""
