"""Imported by the server that victims are forked from: everything that takes time, done once."""

import torch

from abuse.writer import model_and_batch

torch.set_num_threads(1)
model_and_batch()
