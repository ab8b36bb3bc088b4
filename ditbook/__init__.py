"""Runnable companion to *On Statistical Rates and Provably Efficient Criteria of Latent Diffusion Transformers*.

One module per section of the paper. Tokens are rows, shape ``(..., L, d)``; ``sigma(t)`` is a variance.
"""

__version__ = "0.1.0"
