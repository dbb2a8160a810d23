"""A decoder in today's style, in plain PyTorch and in plain MindSpore, with one configuration and the same weights."""
