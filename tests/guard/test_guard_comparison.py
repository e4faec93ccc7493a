from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpl.guard import GuardSettings
from dpl.guard.comparison import (
    ComparisonResult,
    SourceComparison,
    confidences,
    explained_variance,
    margins,
    preferences,
    slow_class_loss,
    stack_logits,
)

CLASSES = 10


def labels(count: int, seed: int = 0) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def sure_of(answers: Tensor, confidence: float = 0.9, classes: int = CLASSES) -> Tensor:
    """Logits of a model that gives these answers with this confidence."""
    rest = (1 - confidence) / (classes - 1)
    p = torch.full((len(answers), classes), rest).scatter(1, answers[:, None], confidence)
    return p.log()


def feed(source: list[Tensor], adapted: list[Tensor]) -> tuple[SourceComparison, list[ComparisonResult]]:
    comparison = SourceComparison(GuardSettings())
    return comparison, [comparison.compare(s, a) for s, a in zip(source, adapted, strict=True)]


def test_equal_predictions_are_no_loss() -> None:
    logits = [sure_of(labels(32, i)) for i in range(20)]
    comparison, signals = feed(logits, logits)
    assert comparison.lost == 0
    assert signals[-1].disagreement == signals[-1].regret == signals[-1].confidence == 0
    assert signals[-1].shuffled


@pytest.mark.parametrize("in_order", [False, True])
def test_an_unconfident_disagreement_with_a_confident_source_is_loss(in_order: bool) -> None:
    truth = [labels(32, i).sort().values if in_order else labels(32, i) for i in range(10)]
    wrong = [sure_of((y + 1 + labels(32, 99) % 9) % CLASSES, 0.3) for y in truth]
    _, signals = feed([sure_of(y) for y in truth], wrong)
    assert signals[0].lost > 8


def test_a_confident_disagreement_with_an_unconfident_source_is_no_loss() -> None:
    truth = [labels(32, i) for i in range(40)]
    source = [sure_of((y + labels(32, 50 + i) % 3) % CLASSES, 0.5) for i, y in enumerate(truth)]
    comparison, signals = feed(source, [sure_of(y) for y in truth])
    assert signals[-1].disagreement > 0.5
    assert comparison.lost == 0


def test_a_confident_collapse_is_loss() -> None:
    truth = [labels(32, i) for i in range(10)]
    collapsed = [sure_of(torch.where(y < 7, 3, y), 0.999) for y in truth]
    comparison, signals = feed([sure_of(y, 0.6) for y in truth], collapsed)
    assert signals[-1].confidence > 0.3
    assert signals[-1].narrowing > 0.3
    assert comparison.lost > 8


def sorted_runs(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """A shuffled beginning, then runs of one class, in which the source errs, unsurely, on a third of the rows."""
    truth = [labels(32, seed + i) for i in range(20)] + [torch.full((32,), i % CLASSES) for i in range(40)]
    erring = torch.arange(32) % 3 == 0
    unsure = torch.where(erring, 0.7, 1.0)[:, None]
    source = [sure_of(torch.where(erring, labels(32, 100 + i), y), 0.9) * unsure for i, y in enumerate(truth)]
    return truth, source


def test_fewer_classes_in_a_stream_sorted_by_class_are_no_collapse() -> None:
    truth, source = sorted_runs()
    comparison, signals = feed(source, [sure_of(y, 0.8) for y in truth])
    assert signals[15].shuffled
    assert not signals[-1].shuffled
    assert signals[-1].adapted_classes < signals[-1].classes
    assert comparison.lost < 4


def test_predicting_one_class_throughout_a_sorted_stream_is_loss() -> None:
    truth, source = sorted_runs()
    comparison, _ = feed(source, [sure_of(torch.zeros_like(y), 0.99) for y in truth])
    assert comparison.lost > 8


def test_a_class_lost_over_many_runs_is_loss() -> None:
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


def test_random_predictions_in_a_sorted_stream_are_loss() -> None:
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


def test_lower_confidence_is_no_loss_in_a_shuffled_stream() -> None:
    """A method that averages its answers is less sure of everything, also where it is right."""
    truth = [labels(32, i) for i in range(60)]
    wrong_tenth = [torch.where(torch.arange(32) % 10 == 0, (y + 1) % CLASSES, y) for y in truth]
    source = [sure_of(y, 0.9) * torch.where(torch.arange(32) % 10 == 0, 0.6, 1.0)[:, None] for y in wrong_tenth]
    comparison, signals = feed(source, [0.5 * sure_of(y, 0.9) for y in truth])
    assert signals[-1].confidence < -0.2
    assert comparison.lost < 4


def test_lost_predictions_decrease_while_both_models_agree() -> None:
    truth = labels(32)
    comparison = SourceComparison(GuardSettings())
    comparison.compare(sure_of(truth), sure_of((truth + 1) % CLASSES, 0.3))
    before = comparison.lost
    for i in range(60):
        comparison.compare(sure_of(labels(32, i)), sure_of(labels(32, i)))
    assert before > 4
    assert comparison.lost < before - 4


def test_losses_of_single_images_add_up() -> None:
    truth = labels(64)
    source, adapted = sure_of(truth), sure_of((truth + 3) % CLASSES, 0.3)
    comparison, signals = feed(list(source.split(1)), list(adapted.split(1)))
    assert signals[0].lost < 1
    assert comparison.lost > 8


@pytest.mark.parametrize(("classes", "present", "few"), [(10, 1, True), (10, 2, True), (10, 6, False), (2, 1, False)])
def test_a_stream_of_few_classes_is_recognised(classes: int, present: int, few: bool) -> None:
    logits = [sure_of(labels(32, i) % present, 0.9, classes) for i in range(20)]
    assert feed(logits, logits)[0].has_few_classes is few


def blurred(seed: int) -> Tensor:
    """Logits without groups: answers of all classes, none of them decided."""
    return torch.randn(32, CLASSES, generator=torch.Generator().manual_seed(seed))


def test_an_adapted_model_that_sees_more_classes_in_a_stream_of_few_is_recognised() -> None:
    few = [sure_of(labels(32, i) % 2) for i in range(9)]
    comparison, signals = feed(few, [blurred(i) for i in range(9)])
    assert comparison.has_few_classes
    assert comparison.adapted_has_more_classes
    assert not signals[-1].distinct
    assert not feed(few, few)[0].adapted_has_more_classes


def test_distinct_adapted_predictions_outweigh_a_source_that_predicts_few_classes() -> None:
    """What a broken source calls one class, the adapted model takes apart into groups: the stream has all classes."""
    few, many = [sure_of(labels(32, i) % 2, 0.8) for i in range(40)], [sure_of(labels(32, i)) for i in range(40)]
    comparison, signals = feed(few, many)
    assert signals[-1].distinct
    assert signals[-1].shuffled
    assert not comparison.has_few_classes
    assert comparison.lost == 0
    torn = [answer + 0.8 * answer.roll(1, dims=1) for answer in many]  # the second answer is nearly as good
    assert feed(few, torn)[0].has_few_classes, "groups that are less decided than the source's answers are not believed"


def stable(kept: int, rows: int = 32) -> Callable[[], Tensor]:
    """The result of a test for batch dependence."""
    return lambda: torch.arange(rows) < kept


def test_predictions_that_depend_on_the_batch_are_not_believed() -> None:
    """The same two models, told apart by the test alone."""
    few, many = [sure_of(labels(32, i) % 2, 0.8) for i in range(20)], [sure_of(labels(32, i)) for i in range(20)]
    believed, torn = SourceComparison(GuardSettings()), SourceComparison(GuardSettings())
    for source, adapted in zip(few, many, strict=True):
        believed.compare(source, adapted, stable(28))
        torn.compare(source, adapted, stable(14))
    assert not believed.has_few_classes
    assert believed.lost == 0
    assert torn.has_few_classes
    assert torn.lost > 8


def test_batch_dependence_is_tested_only_where_it_decides_and_not_every_time() -> None:
    asked: list[int] = []

    def ask() -> Tensor:
        asked.append(1)
        return torch.ones(32, dtype=torch.bool)

    many, few = [sure_of(labels(32, i)) for i in range(40)], [sure_of(labels(32, i) % 2) for i in range(40)]
    comparison = SourceComparison(GuardSettings())
    for logits in many:
        comparison.compare(logits, logits, ask)
    assert not asked
    comparison.restart()
    for source, adapted in zip(few, many, strict=True):
        for rows in (source[:8], adapted[:8]), (source[8:16], adapted[8:16]):
            comparison.compare(*rows, ask)
    assert 4 <= len(asked) < 30


@pytest.mark.parametrize("changed", ["unsure", "one class"])
def test_a_sudden_change_of_the_adapted_predictions_is_unusual(changed: str) -> None:
    comparison = SourceComparison(GuardSettings())
    assert not any(comparison.observe_adapted(sure_of(labels(32, i))) for i in range(30))
    odd = sure_of(labels(32, 99), 0.4) if changed == "unsure" else sure_of(torch.zeros(32, dtype=torch.long))
    assert comparison.observe_adapted(odd)
    comparison.restart()
    assert not comparison.observe_adapted(odd), "nothing is usual yet"


def test_regret_equals_its_loop() -> None:
    """The reference: preference for the own class, the source model's minus the adapted model's, at equal scale."""
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
    comparison = SourceComparison(GuardSettings())
    signals = comparison.compare(source, adapted)
    seen = comparison.balance
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


def test_a_restored_comparison_continues_exactly() -> None:
    first, second = SourceComparison(GuardSettings()), SourceComparison(GuardSettings())
    for i in range(7):
        first.compare(sure_of(labels(5, i)), sure_of(labels(5, i + 1), 0.5))
    state = {key: value.clone() for key, value in first.state().items()}
    second.check(state)
    second.restore(state)
    for i in range(7, 20):
        batch = sure_of(labels(5, i)), sure_of(labels(5, i + 1), 0.5)
        assert first.compare(*batch) == second.compare(*batch)
    second.restart()
    assert second.lost == 0
    assert second.counts is None
    assert second.long_run_counts is not None, "the stream is still the same"


def test_images_that_are_not_compared_also_make_the_long_memory_decay() -> None:
    """What was earned long ago must not hide that nothing is earned now, however few rows are looked at."""
    comparison, logits = SourceComparison(GuardSettings(memory=8)), sure_of(labels(32, 1))
    comparison.compare(logits, logits)
    for _ in range(40):
        comparison.observe_adapted(logits)
    comparison.compare(logits, logits)
    assert comparison.slow_counts is not None
    assert float(comparison.slow_counts[0].sum()) < 33


def test_preferences_confidences_and_margins_equal_their_loops() -> None:
    g = torch.Generator().manual_seed(1)
    logits = stack_logits(torch.randn(5, 7, generator=g), torch.randn(5, 7, generator=g).half())
    answers = logits.argmax(dim=2)
    preferred, sure = preferences(logits, answers), confidences(logits)
    apart = margins(logits, logits.var(2, correction=0))
    for model in range(2):
        for row in range(5):
            z = logits[model, row]
            p, best = z.softmax(0), z.sort(descending=True).values
            own, rival = answers[model, row], answers[1 - model, row]
            assert float(preferred[model, row]) == pytest.approx(float(p[own] - p[rival]), abs=1e-6)
            assert float(sure[model, row]) == pytest.approx(float(p.max()), abs=1e-6)
            assert float(apart[model, row]) == pytest.approx(float((best[0] - best[1]) / z.std(correction=0)), abs=1e-5)


def test_explained_variance_equals_its_loop() -> None:
    """The reference: variance between the answers' groups over all variance, less what chance explains."""
    logits = torch.randn(40, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    answers = logits.argmax(dim=1)
    groups = sorted(set(answers.tolist()))
    centre = logits.mean(dim=0)
    between = 0.0
    for name in groups:
        rows = [row for row in range(40) if int(answers[row]) == name]
        between += len(rows) * float((logits[rows].mean(dim=0) - centre).square().sum())
    share = between / sum(float((row - centre).square().sum()) for row in logits)
    found, weight = explained_variance(logits, answers)
    chance = (len(groups) - 1) / 39
    assert found / weight == pytest.approx((share - chance) / (1 - chance))
    assert explained_variance(logits[:1], answers[:1]) == [0, 0]


def test_predictions_that_merely_differ_are_no_slow_class_loss_but_a_forgotten_class_is() -> None:
    g = torch.Generator().manual_seed(3)
    shares = torch.softmax(0.7 * torch.randn(10, generator=g), dim=0)
    certain, forgotten = 0, []
    for _ in range(50):
        ours, others = (torch.multinomial(shares, 4096, replacement=True, generator=g) for _ in range(2))
        theirs = torch.where(torch.rand(4096, generator=g) < 0.2, others, ours)
        largest = int(shares.argmax())
        forgetful = torch.where(torch.rand(4096, generator=g) < 0.02, largest, ours)
        certain += slow_class_loss(_counts(ours, theirs), int((ours != theirs).sum()))[1] > 8
        forgotten.append(slow_class_loss(_counts(ours, forgetful), int((ours != forgetful).sum())))
    assert certain <= 1
    assert sum(each[0] > 0 for each in forgotten) == 50
    assert sum(each[1] > 8 for each in forgotten) > 40
    assert slow_class_loss(None, 0.0) == [0.0, 0.0]


def test_a_slow_class_loss_is_doubtful_unless_the_balance_improved_or_hardly_a_prediction_differs() -> None:
    g = torch.Generator().manual_seed(4)
    narrow = torch.multinomial(torch.softmax(0.7 * torch.randn(10, generator=g), dim=0), 512, True, generator=g)
    wide = torch.where(torch.rand(512, generator=g) < 0.15, torch.randint(10, (512,), generator=g), narrow)
    assert slow_class_loss(_counts(narrow, wide), int((narrow != wide).sum()))[0] == 0, "it earns"
    assert slow_class_loss(_counts(narrow, narrow.roll(1)), 400)[0] > 0, "the balance is the same: it earns nothing"
    assert slow_class_loss(_counts(narrow, narrow), 2)[0] == 0, "hardly an answer differs"


def _counts(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.bincount(each, minlength=10) for each in (ours, theirs)]).double()
