"""Reads the quantised linears of checkpoints that other libraries wrote: FP8, GPTQ, AWQ, compressed-tensors.

What is quantised, and how, is read from the files' headers: lists of modules in config.json need not be interpreted.
"""
