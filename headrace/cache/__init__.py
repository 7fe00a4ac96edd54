"""Pages of the KV cache: who holds them, what they contain. No torch, no knowledge of layers'
insides.
"""
