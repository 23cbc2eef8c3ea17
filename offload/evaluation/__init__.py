"""How well a model continues a text: perplexity, agreement with another run of it, and the needle test.

For modes that change the answer: rounded weights, quantised or dropped keys and values. Nothing here knows which. A
baseline that is no way to decode is here as well: the sliding window with recomputation.
"""
