"""A model through its whole training: statistics of every module, recorded into a folder that can
be read meanwhile.
"""
