"""How well a model continues a text: perplexity, and agreement with another run of it.

For modes that change the answer: rounded weights, quantised or dropped keys and values. Nothing here knows which.
"""
