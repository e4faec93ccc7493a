from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpl.guard import GuardSettings
from dpl.guard.health import Health, Signals

CLASSES = 10


def labels(count: int, seed: int = 0) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def sure_of(answers: Tensor, confidence: float = 0.9, classes: int = CLASSES) -> Tensor:
    """Logits of a model that gives these answers with this confidence."""
    rest = (1 - confidence) / (classes - 1)
    p = torch.full((len(answers), classes), rest).scatter(1, answers[:, None], confidence)
    return p.log()


def feed(source: list[Tensor], adapted: list[Tensor], **settings: float) -> tuple[Health, list[Signals]]:
    health = Health(GuardSettings(**settings))
    return health, [health.judge(s, a) for s, a in zip(source, adapted, strict=True)]


def test_the_same_answers_lose_nothing() -> None:
    logits = [sure_of(labels(32, i)) for i in range(20)]
    health, signals = feed(logits, logits)
    assert health.lost == 0
    assert signals[-1].disagreement == signals[-1].regret == signals[-1].confidence == 0
    assert signals[-1].shuffled


@pytest.mark.parametrize("in_order", [False, True])
def test_unsure_contradiction_of_a_sure_source_is_loss(in_order: bool) -> None:
    truth = [labels(32, i).sort().values if in_order else labels(32, i) for i in range(10)]
    wrong = [sure_of((y + 1 + labels(32, 99) % 9) % CLASSES, 0.3) for y in truth]
    _, signals = feed([sure_of(y) for y in truth], wrong)
    assert signals[0].lost > 8


def test_sure_contradiction_of_an_unsure_source_is_gain() -> None:
    truth = [labels(32, i) for i in range(40)]
    source = [sure_of((y + labels(32, 50 + i) % 3) % CLASSES, 0.5) for i, y in enumerate(truth)]
    health, signals = feed(source, [sure_of(y) for y in truth])
    assert signals[-1].disagreement > 0.5
    assert health.lost == 0


def test_collapse_is_loss_however_sure_it_is() -> None:
    truth = [labels(32, i) for i in range(10)]
    collapsed = [sure_of(torch.where(y < 7, 3, y), 0.999) for y in truth]
    health, signals = feed([sure_of(y, 0.6) for y in truth], collapsed)
    assert signals[-1].confidence > 0.3
    assert signals[-1].narrowing > 0.3
    assert health.lost > 8


def sorted_runs(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """A shuffled beginning, then runs of one class, in which the source errs, unsurely, on a third of the rows."""
    truth = [labels(32, seed + i) for i in range(20)] + [torch.full((32,), i % CLASSES) for i in range(40)]
    erring = torch.arange(32) % 3 == 0
    unsure = torch.where(erring, 0.7, 1.0)[:, None]
    source = [sure_of(torch.where(erring, labels(32, 100 + i), y), 0.9) * unsure for i, y in enumerate(truth)]
    return truth, source


def test_cleaning_up_a_stream_sorted_by_class_is_no_collapse() -> None:
    truth, source = sorted_runs()
    health, signals = feed(source, [sure_of(y, 0.8) for y in truth])
    assert signals[15].shuffled
    assert not signals[-1].shuffled
    assert signals[-1].adapted_classes < signals[-1].classes
    assert health.lost < 4


def test_sticking_to_one_class_of_a_sorted_stream_is_collapse() -> None:
    truth, source = sorted_runs()
    health, _ = feed(source, [sure_of(torch.zeros_like(y), 0.99) for y in truth])
    assert health.lost > 8


def test_a_class_that_fades_over_many_runs_is_loss() -> None:
    """Nearly half of four classes goes to a fifth, surely; in each run both models still see the same class most."""
    truth = [torch.full((16,), (7 * i) % CLASSES) for i in range(120)]
    fading = (torch.arange(16) % 5 < 2)[:, None]
    kept, faded = ([sure_of(y, 0.9) for y in truth], [sure_of(torch.where(y > 5, 3, y), 0.95) for y in truth])
    adapted = [torch.where(fading, f, k) for f, k in zip(faded, kept, strict=True)]
    source = [sure_of(y, 0.9) * 0.2 for y in truth]
    _, signals = feed(source, adapted)
    assert not signals[-1].shuffled
    assert max(s.lost for s in signals) > 8
    assert feed(source, kept)[0].lost == 0


def test_spreading_the_answers_of_a_sorted_stream_is_loss() -> None:
    """What batch statistics do there: random answers, less sure where they contradict the source."""
    truth, source = sorted_runs()
    adapted = [sure_of(y) for y in truth[:20]]
    for i in range(20, 60):
        answers = labels(32, 300 + i)
        right = answers == source[i].argmax(dim=1)
        adapted.append(sure_of(answers, 0.8) * torch.where(right, 1.0, 0.7)[:, None])
    _, signals = feed(source, adapted)
    assert max(s.lost for s in signals[:20]) < 4
    assert signals[30].lost > 8


def test_modesty_is_no_loss_in_a_shuffled_stream() -> None:
    """A method that averages its answers is less sure of everything, also where it is right."""
    truth = [labels(32, i) for i in range(60)]
    wrong_tenth = [torch.where(torch.arange(32) % 10 == 0, (y + 1) % CLASSES, y) for y in truth]
    source = [sure_of(y, 0.9) * torch.where(torch.arange(32) % 10 == 0, 0.6, 1.0)[:, None] for y in wrong_tenth]
    health, signals = feed(source, [0.5 * sure_of(y, 0.9) for y in truth])
    assert signals[-1].confidence < -0.2
    assert health.lost < 4


def test_losses_heal() -> None:
    truth = labels(32)
    health = Health(GuardSettings())
    health.judge(sure_of(truth), sure_of((truth + 1) % CLASSES, 0.3))
    before = health.lost
    for i in range(60):
        health.judge(sure_of(labels(32, i)), sure_of(labels(32, i)))
    assert before > 4
    assert health.lost < before - 4


def test_one_row_at_a_time_adds_up() -> None:
    truth = labels(64)
    source, adapted = sure_of(truth), sure_of((truth + 3) % CLASSES, 0.3)
    health, signals = feed(list(source.split(1)), list(adapted.split(1)))
    assert signals[0].lost < 1
    assert health.lost > 8


@pytest.mark.parametrize(("classes", "present", "poor"), [(10, 1, True), (10, 2, True), (10, 6, False), (2, 1, False)])
def test_a_stream_of_few_classes_is_poor(classes: int, present: int, poor: bool) -> None:
    logits = [sure_of(labels(32, i) % present, 0.9, classes) for i in range(20)]
    assert feed(logits, logits)[0].poor is poor


def blurred(seed: int) -> Tensor:
    """Logits without groups: answers of all classes, none of them decided."""
    return torch.randn(32, CLASSES, generator=torch.Generator().manual_seed(seed))


def test_a_poor_stream_is_enriched_by_an_adapted_model_that_sees_more() -> None:
    few = [sure_of(labels(32, i) % 2) for i in range(9)]
    health, signals = feed(few, [blurred(i) for i in range(9)])
    assert health.poor
    assert health.enriched
    assert not signals[-1].distinct
    assert not feed(few, few)[0].enriched


def test_a_source_of_few_classes_is_not_believed_against_distinct_answers() -> None:
    """What a broken source calls one class, the adapted model takes apart into groups: the stream is not poor."""
    few, many = [sure_of(labels(32, i) % 2, 0.8) for i in range(40)], [sure_of(labels(32, i)) for i in range(40)]
    health, signals = feed(few, many)
    assert signals[-1].distinct
    assert signals[-1].shuffled
    assert not health.poor
    assert health.lost == 0
    torn = [answer + 0.8 * answer.roll(1, dims=1) for answer in many]  # the second answer is nearly as good
    assert feed(few, torn)[0].poor, "groups that are less decided than the source's answers are not believed"


def answers(kept: int, rows: int = 32) -> Callable[[], Tensor]:
    """What a test in other company may show."""
    return lambda: torch.arange(rows) < kept


def test_answers_that_do_not_survive_in_other_company_are_not_believed() -> None:
    """The same two models, told apart by the test alone."""
    few, many = [sure_of(labels(32, i) % 2, 0.8) for i in range(20)], [sure_of(labels(32, i)) for i in range(20)]
    believed, torn = Health(GuardSettings()), Health(GuardSettings())
    for source, adapted in zip(few, many, strict=True):
        believed.judge(source, adapted, answers(28))
        torn.judge(source, adapted, answers(14))
    assert not believed.poor
    assert believed.lost == 0
    assert torn.poor
    assert torn.lost > 8


def test_other_company_is_asked_for_only_where_it_decides_and_not_every_time() -> None:
    asked: list[int] = []

    def ask() -> Tensor:
        asked.append(1)
        return torch.ones(32, dtype=torch.bool)

    many, few = [sure_of(labels(32, i)) for i in range(40)], [sure_of(labels(32, i) % 2) for i in range(40)]
    health = Health(GuardSettings())
    for logits in many:
        health.judge(logits, logits, ask)
    assert not asked
    health.restart()
    for source, adapted in zip(few, many, strict=True):
        for rows in (source[:8], adapted[:8]), (source[8:16], adapted[8:16]):
            health.judge(*rows, ask)
    assert 4 <= len(asked) < 30


@pytest.mark.parametrize("changed", ["unsure", "one class"])
def test_a_sudden_change_of_the_adapted_answers_is_a_surprise(changed: str) -> None:
    health = Health(GuardSettings())
    assert not any(health.surprised_by(sure_of(labels(32, i))) for i in range(30))
    odd = sure_of(labels(32, 99), 0.4) if changed == "unsure" else sure_of(torch.zeros(32, dtype=torch.long))
    assert health.surprised_by(odd)
    health.restart()
    assert not health.surprised_by(odd), "nothing is usual yet"


def test_regret_is_what_the_words_say() -> None:
    """A slow twin: belief in the own answer over the other's, the source's minus the adapted model's at equal scale."""
    g = torch.Generator().manual_seed(3)
    source = 2 * torch.randn(64, CLASSES, generator=g)
    adapted = 0.3 * source + 0.4 * torch.randn(64, CLASSES, generator=g)
    own, other = source.argmax(1).tolist(), adapted.argmax(1).tolist()
    agreeing = [row for row in range(64) if own[row] == other[row]]
    variance = [sum(float(z[row].var(correction=0)) for row in agreeing) for z in (source, adapted)]
    scale = (variance[0] / variance[1]) ** 0.5
    total = 0.0
    for row in range(64):
        p, q = source[row].softmax(0), (scale * adapted[row]).softmax(0)
        total += float(p[own[row]] - p[other[row]]) - float(q[other[row]] - q[own[row]])
    health = Health(GuardSettings())
    signals = health.judge(source, adapted)
    seen = health._assess()
    assert 10 < len(agreeing) < 60
    assert seen.shuffled
    assert signals.narrowing == 0
    assert signals.regret == pytest.approx(total / 64 - 0.1 * max(0.0, seen.gain), abs=1e-6)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0])
def test_the_scale_of_the_logits_does_not_matter(factor: float) -> None:
    g = torch.Generator().manual_seed(3)
    source = [2 * torch.randn(32, CLASSES, generator=g) for _ in range(5)]
    adapted = [s + torch.randn(32, CLASSES, generator=g) for s in source]
    _, plain = feed(source, adapted)
    _, scaled = feed(source, [factor * a for a in adapted])
    assert [s.regret for s in scaled] == pytest.approx([s.regret for s in plain], abs=1e-5)


def test_state_returns_exactly() -> None:
    first, second = Health(GuardSettings()), Health(GuardSettings())
    for i in range(7):
        first.judge(sure_of(labels(5, i)), sure_of(labels(5, i + 1), 0.5))
    state = {key: value.clone() for key, value in first.state().items()}
    second.check(state)
    second.restore(state)
    for i in range(7, 20):
        batch = sure_of(labels(5, i)), sure_of(labels(5, i + 1), 0.5)
        assert first.judge(*batch) == second.judge(*batch)
    second.restart()
    assert second.lost == 0
    assert second.balance is None
    assert second.usual is not None, "the stream is still the same"


def test_rows_that_pass_unseen_also_make_the_long_memory_fade() -> None:
    """What was earned long ago must not hide that nothing is earned now, however few rows are looked at."""
    health, logits = Health(GuardSettings(memory=8)), sure_of(labels(32, 1))
    health.judge(logits, logits)
    for _ in range(40):
        health.surprised_by(logits)
    health.judge(logits, logits)
    assert health.long is not None
    assert float(health.long[0].sum()) < 33
