"""The algorithm: arrays in, arrays out. No Flax, no files, no flags."""
