"""The systems of other projects exactly as published: their networks, their weights, their samplers.

They are imported (`convergeflow import`), sampled and measured, never trained. `docs/peers.md` says of each what is
faithful and what is reconstructed.
"""
