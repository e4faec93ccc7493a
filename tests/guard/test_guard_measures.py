"""What is read off logits, against slow twins."""

import pytest
import torch

from dpl.guard.measures import beliefs, both, confidences, explained, faded, margins


def test_beliefs_confidences_and_margins_are_what_the_words_say() -> None:
    g = torch.Generator().manual_seed(1)
    logits = both(torch.randn(5, 7, generator=g), torch.randn(5, 7, generator=g).half())
    answers = logits.argmax(dim=2)
    believed, sure, apart = beliefs(logits, answers), confidences(logits), margins(logits, logits.var(2, correction=0))
    for model in range(2):
        for row in range(5):
            z = logits[model, row]
            p, best = z.softmax(0), z.sort(descending=True).values
            own, rival = answers[model, row], answers[1 - model, row]
            assert float(believed[model, row]) == pytest.approx(float(p[own] - p[rival]), abs=1e-6)
            assert float(sure[model, row]) == pytest.approx(float(p.max()), abs=1e-6)
            assert float(apart[model, row]) == pytest.approx(float((best[0] - best[1]) / z.std(correction=0)), abs=1e-5)


def test_what_answers_explain_is_what_the_words_say() -> None:
    """A slow twin: variance between the answers' groups over all variance, less what chance explains."""
    logits = torch.randn(40, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    answers = logits.argmax(dim=1)
    groups = sorted(set(answers.tolist()))
    centre = logits.mean(dim=0)
    between = 0.0
    for name in groups:
        rows = [row for row in range(40) if int(answers[row]) == name]
        between += len(rows) * float((logits[rows].mean(dim=0) - centre).square().sum())
    share = between / sum(float((row - centre).square().sum()) for row in logits)
    found, weight = explained(logits, answers)
    chance = (len(groups) - 1) / 39
    assert found / weight == pytest.approx((share - chance) / (1 - chance))
    assert explained(logits[:1], answers[:1]) == [0, 0]


def test_rows_that_merely_differ_do_not_fade_but_a_class_that_is_forgotten_does() -> None:
    g = torch.Generator().manual_seed(3)
    shares = torch.softmax(0.7 * torch.randn(10, generator=g), dim=0)
    certain, forgotten = 0, []
    for _ in range(50):
        ours, others = (torch.multinomial(shares, 4096, replacement=True, generator=g) for _ in range(2))
        theirs = torch.where(torch.rand(4096, generator=g) < 0.2, others, ours)
        largest = int(shares.argmax())
        forgetful = torch.where(torch.rand(4096, generator=g) < 0.02, largest, ours)
        certain += faded(_counts(ours, theirs), int((ours != theirs).sum()))[1] > 8
        forgotten.append(faded(_counts(ours, forgetful), int((ours != forgetful).sum())))
    assert certain <= 1
    assert sum(each[0] > 0 for each in forgotten) == 50
    assert sum(each[1] > 8 for each in forgotten) > 40
    assert faded(None, 0.0) == [0.0, 0.0]


def test_only_a_clearly_better_balance_or_none_but_equal_answers_leave_no_doubt() -> None:
    g = torch.Generator().manual_seed(4)
    narrow = torch.multinomial(torch.softmax(0.7 * torch.randn(10, generator=g), dim=0), 512, True, generator=g)
    wide = torch.where(torch.rand(512, generator=g) < 0.15, torch.randint(10, (512,), generator=g), narrow)
    assert faded(_counts(narrow, wide), int((narrow != wide).sum()))[0] == 0, "it earns"
    assert faded(_counts(narrow, narrow.roll(1)), 400)[0] > 0, "the balance is the same: it earns nothing"
    assert faded(_counts(narrow, narrow), 2)[0] == 0, "hardly an answer differs"


def _counts(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.bincount(each, minlength=10) for each in (ours, theirs)]).double()
