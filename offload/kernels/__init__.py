"""Compute kernels of a decoder layer on each device: attention, the merge of partial attention, linears."""
