"""From logits to tokens: parameters, addressed noise, the sampler."""
