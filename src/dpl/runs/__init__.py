"""A stream of images through an adaptive model, recorded: one online loop, what it costs, and folders of images.

Nothing here knows of benchmarks, data sets by name or the command line.
"""
