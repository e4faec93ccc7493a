"""A second network that follows the student by an exponential moving average of its weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpl.core.state import Stateful
from dpl.memory.ema import ema_update, share_frozen
from dpl.network import Network, Pass
from dpl.network.norm_control import Rule

__all__ = ["AnsweredByTeacher", "Teacher"]


class Teacher(Stateful):
    """A copy of the student's network without gradients; weights that do not train exist once."""

    weights: nn.Module

    def __init__(self, student: Network, momentum: float = 1.0, rule: Rule | None = None) -> None:
        super().__init__()
        self.student, self.momentum = student, momentum
        self.network = Network(student.module, classifier=student.classifier_name)
        self.network.norm.rule = rule or student.norm.rule
        share_frozen(self.network.module, student.module)
        self.declare_module("weights", self.network.module.requires_grad_(False))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Pass:
        """Run the teacher's network."""
        return self.network(images)

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Follow the student to another device or type."""
        super().move(transfer)
        self.network.update_references()

    def follow(self, momentum: float | None = None) -> None:
        """Move towards the student, keeping a share `momentum` of the present weights."""
        kept = self.momentum if momentum is None else momentum
        ema_update(self.weights.parameters(), self.student.module.parameters(), kept)


class AnsweredByTeacher:
    """What a method adds whose teacher predicts; it stands before the method's base class."""

    teacher: Teacher

    @property
    def predicting(self) -> Network:
        """The teacher's network."""
        return self.teacher.network

    def predict(self, images: Tensor) -> Tensor:
        """Predict with the teacher and its statistics, and change nothing."""
        return self.teacher(images).logits
