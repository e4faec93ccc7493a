"""The parts of a page that are text and tables."""

from collections.abc import Iterable, Sequence
from html import escape

from dpl.report.beside import AVERAGE, AccuracyTable, Figure, Printed
from dpl.report.costs import Cost, costs
from dpl.report.health import Sign, signs, skipped
from dpl.report.model import Experiment, paired
from dpl.reproduce.document import Item

__all__ = ["accuracy_part", "card", "cost_part", "facts_part", "health_part", "scrolled", "text", "tiles"]

_MOST_EVENTS = 200


def text(value: object) -> str:
    """Return a value as it may stand in markup."""
    return escape(str(value).replace("->", "→"))


def card(title: str, *content: str, wide: str = "") -> str:
    """Return a titled box."""
    return (
        f'<section class="card"{wide}><h4>{title}</h4>\n' + "\n".join(part for part in content if part) + "\n</section>"
    )


def scrolled(name: str, kind: str, heads: Iterable[str], rows: str) -> str:
    """Return a table that scrolls by itself where it is wider than the screen."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(name)}"><table class="{kind}"><thead><tr>'
        f"{''.join(heads)}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def tiles(experiment: Experiment, table: AccuracyTable | None) -> str:
    """Return the few figures that say it all."""
    entries: list[tuple[str, str]] = []
    entries += _unlabelled_tiles(experiment) if table is None else _accuracy_tiles(experiment, table)
    images = sum({row["stream"]: row["n"] for row in experiment.rows}.values())
    seeds = len({row["seed"] for row in experiment.rows})
    streams = f"{len(experiment.streams)} streams" if len(experiment.streams) > 1 else "one stream"
    entries.append((f"{images:,} images", f"{streams}, {seeds} {'seed' if seeds == 1 else 'seeds'}"))
    count = len(experiment.methods)
    entries.append((f"{count} {'method' if count == 1 else 'methods'}", f"{len(experiment.classes):,} classes"))
    found = "".join(f'<div class="tile"><b>{text(big)}</b><span>{text(small)}</span></div>' for big, small in entries)
    return f'<div class="tiles">{found}</div>'


def _unlabelled_tiles(experiment: Experiment) -> list[tuple[str, str]]:
    """Return what can be said without labels: how sure, how far from the source, who answered."""
    stream, entries = experiment.streams[0], []
    for method in experiment.methods:
        tracks = experiment.tracks.get((method, stream), ())
        if not tracks or method == experiment.reference:
            continue
        entries.append((f"{100 * tracks[0].confidence.mean():.0f} %", f"mean confidence: {method}"))
        for source in experiment.tracks.get((experiment.reference or "", stream), ())[:1]:
            first, second = paired(source, tracks[0])
            same = 100 * float((first.prediction == second.prediction).mean())
            entries.append((f"{same:.1f} %", "same answer as the source"))
    counts = [row["by_source"] for row in experiment.rows if row.get("by_source")]
    return entries + [(f"{count:,}", "images that the guard had answered by the source") for count in counts]


def _accuracy_tiles(experiment: Experiment, table: AccuracyTable) -> list[tuple[str, str]]:
    column = table.columns[-1]
    scored = {m: found.value for m in experiment.methods if (found := table.measured.get((m, column))) is not None}
    if not scored:
        return []
    best = max(scored, key=lambda method: scored[method])
    what = "average accuracy" if column == AVERAGE else "accuracy"
    entries = [(f"{scored[best]:.1f} %", f"best {what}: {best}")]
    source = scored.get(experiment.reference or "")
    if source is not None and best != experiment.reference:
        entries = [
            *entries,
            (f"{source:.1f} %", "the source model"),
            (f"{scored[best] - source:+.1f}", "points over the source"),
        ]
    return entries


def accuracy_part(experiment: Experiment, table: AccuracyTable) -> str:
    """Return the table of accuracies with what the paper prints beside."""
    beside = [found for (_, column), found in table.printed.items() if column == AVERAGE]
    gains = experiment.reference is not None and (experiment.reference, table.columns[-1]) in table.measured
    first, rest = _order(table)
    heads = [_head(name, table) for name in first]
    heads += [_heading("vs source")] if gains else []
    heads += [_heading("reported", f"mean of {beside[0].streams}")] if beside else []
    heads += [_head(name, table) for name in rest]
    rows = "".join(_row(experiment, table, method, gains, bool(beside)) for method in experiment.methods)
    caption = (
        "Online accuracy in percent, mean ± standard deviation over seeds; the best of a column is bold. "
        "● marks the source model. A heading sorts."
    )
    notes = "".join(f"<li>{text(note)}</li>" for note in table.notes)
    table_ = scrolled("Accuracy", "sortable accuracy", [_heading("method"), *heads], rows)
    return card(
        "Accuracy", f'<p class="faint">{caption}</p>', table_, f'<ul class="notes">{notes}</ul>' if notes else ""
    )


def _order(table: AccuracyTable) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the column that counts most, which stands first, and the others."""
    return table.columns[-1:], table.columns[:-1]


def _heading(name: str, below: str = "") -> str:
    small = f"<br><small>{text(below)}</small>" if below else ""
    return f'<th scope="col"><button type="button">{text(name)}</button>{small}</th>'


def _head(name: str, table: AccuracyTable) -> str:
    return _heading(name, f"{table.images[name]:,} images" if name in table.images else "")


def _row(experiment: Experiment, table: AccuracyTable, method: str, gains: bool, beside: bool) -> str:
    first, rest = _order(table)
    cells = [_cell(table, method, column) for column in first]
    if gains:
        own = table.measured.get((method, table.columns[-1]))
        base = table.measured[experiment.reference or "", table.columns[-1]]
        cells.append(_gain(own, base) if method != experiment.reference else "<td></td>")
    if beside:
        cells.append(_printed(table.printed.get((method, AVERAGE))))
    cells += [_cell(table, method, column) for column in rest]
    mark = ' class="base"' if method == experiment.reference else ""
    return f'<tr{mark} data-method="{text(method)}"><th scope="row">{text(method)}</th>{"".join(cells)}</tr>\n'


def _cell(table: AccuracyTable, method: str, column: str) -> str:
    found = table.measured.get((method, column))
    if found is None:
        return '<td data-value="-1">–</td>'
    best = ' class="best"' if method in table.best(column) else ""
    deviation = "" if found.deviation is None else f" <small>± {found.deviation:.1f}</small>"
    seeds = f"{found.seeds} {'seed' if found.seeds == 1 else 'seeds'}"
    beside = table.printed.get((method, column)) if column != AVERAGE else None
    below = (
        "" if beside is None else f'<br><span class="reported" title="{text(beside.place)}">{beside.value:.1f}</span>'
    )
    return (
        f'<td data-value="{found.value:.6f}" data-column="{text(column)}"{best} title="{seeds}">'
        f"{found.value:.1f}{deviation}{below}</td>"
    )


def _gain(own: Figure | None, base: Figure) -> str:
    if own is None:
        return '<td data-value="-999">–</td>'
    gain = own.value - base.value
    return f'<td data-value="{gain:.6f}" class="{"good" if gain > 0 else "bad"}">{gain:+.1f}</td>'


def _printed(found: Printed | None) -> str:
    if found is None:
        return '<td data-value="-1">–</td>'
    return f'<td data-value="{found.value}" class="faint" title="{text(found.place)}">{found.value:.1f}</td>'


def cost_part(experiment: Experiment) -> str:
    """Return what each method cost."""
    found = costs(experiment)
    slowest = max((cost.milliseconds or 0 for cost in found), default=0)
    heads = ["method", "ms per image", "× source time", "passes", "GFLOP per image", "peak memory MiB", "updates",
             "batches", "trained values"]  # fmt: skip
    rows = "".join(_cost_row(cost, slowest) for cost in found)
    caption = (
        "Time inside the model, without reading images. Passes: arithmetic, forward and backward, in forward passes of "
        "the source model. Peak memory is that of the whole process (what an earlier run freed may count), "
        "or of the GPU. – was not recorded."
    )
    table = scrolled("Cost", "sortable cost", map(_heading, heads), rows)
    return card("Cost", f'<p class="faint">{caption}</p>', table)


def _cost_row(cost: Cost, slowest: float) -> str:
    width = 5 * (cost.milliseconds or 0) / slowest if slowest else 0
    bar = f'<span class="bar" style="width: {width:.2f}rem" aria-hidden="true"></span>'
    cells = [
        f'<td data-value="{cost.milliseconds or -1}">{bar}{_number(cost.milliseconds, 1)}</td>',
        *(
            f'<td data-value="{-1 if value is None else value}">{_number(value, digits)}</td>'
            for value, digits in (
                (cost.slower, 1), (cost.passes, 1), (cost.gflops, 3), (cost.memory, 0), (cost.updates, 0),
                (cost.batches, 0), (cost.trained, 0),
            )
        ),
    ]  # fmt: skip
    return f'<tr><th scope="row">{text(cost.method)}</th>{"".join(cells)}</tr>\n'


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def health_part(experiment: Experiment) -> str:
    """Return signs of trouble, the guard's events, and skipped updates."""
    found = signs(experiment)
    troubled = list(dict.fromkeys(sign.method for sign in found))
    count = (
        f"{len(troubled)} of {len(experiment.methods)} methods show signs of trouble."
        if found
        else "The answers show no sign of trouble."
    )
    lead = f"<p>{count} Looked for: collapse onto one class, an end below the source, a fall against it.</p>"
    rows = "".join(_sign_row(experiment, method, found) for method in troubled)
    heads = (f'<th scope="col">{text(name)}</th>' for name in ("method", *experiment.streams))
    table = scrolled("Signs of trouble", "signs", heads, rows) if found else ""
    return card("Health", lead, table, _in_words(experiment, found), _events(experiment), _skipped(experiment))


def _sign_row(experiment: Experiment, method: str, found: Sequence[Sign]) -> str:
    cells = []
    for stream in experiment.streams:
        own = [sign for sign in found if (sign.method, sign.stream) == (method, stream)]
        long, short = "; ".join(sign.text for sign in own), ", ".join(sign.short for sign in own)
        cells.append(f'<td class="trouble" title="{text(long)}">{text(short)}</td>' if own else "<td>ok</td>")
    return f'<tr><th scope="row">{text(method)}</th>{"".join(cells)}</tr>'


def _in_words(experiment: Experiment, found: Sequence[Sign]) -> str:
    """Return the signs as sentences."""
    by_method: dict[str, list[str]] = {}
    for sign in found:
        place = f"{sign.stream}: " if len(experiment.streams) > 1 else ""
        by_method.setdefault(sign.method, []).append(f"{place}{sign.text}")
    words = "".join(f"<dt>{text(m)}</dt>" + "".join(f"<dd>{text(t)}</dd>" for t in ts) for m, ts in by_method.items())
    return f"<details><summary>In words</summary><dl>{words}</dl></details>" if words else ""


def _events(experiment: Experiment) -> str:
    if not experiment.guarded:
        return '<p class="faint">No guard was watching this run.</p>'
    if not experiment.events:
        return "<p>The guard watched and had no reason to act.</p>"
    rows = "".join(
        f'<tr{" class=bad" if event.alarm else ""}><td>{event.batch:,}</td><td class="words">{text(event.action)}</td>'
        f'<td class="words">{text(event.reason)}</td></tr>'
        for event in experiment.events[:_MOST_EVENTS]
    )
    rest = len(experiment.events) - _MOST_EVENTS
    more = f'<p class="faint">and {rest:,} more</p>' if rest > 0 else ""
    heads = (f'<th scope="col">{name}</th>' for name in ("batch", "action", "reason"))
    return "<p>What the guard did:</p>" + scrolled("Events of the guard", "events", heads, rows) + more


def _skipped(experiment: Experiment) -> str:
    found = skipped(experiment)
    if not found:
        return ""
    items = "".join(
        f"<li>{text(method)}: {missed:,} of {batches:,} batches; {text(reason)}</li>"
        for method, missed, batches, reason in found
    )
    return f"<details><summary>Batches without an update</summary><ul>{items}</ul></details>"


def facts_part(experiment: Experiment, table: AccuracyTable | None) -> str:
    """Return protocol, settings and versions."""
    lists = "".join(
        f"<details{' open' if number == 0 else ''}><summary>{text(title)}</summary>{_list(items)}</details>"
        for number, (title, items) in enumerate(experiment.facts)
    )
    told = () if table is None else table.notes
    notes = "".join(f"<li>{text(note)}</li>" for note in experiment.notes if note not in told)
    return card("What was run", lists, f'<ul class="notes">{notes}</ul>' if notes else "")


def _list(items: Iterable[Item] | Sequence[Item]) -> str:
    entries = "".join(
        (f"<dt>{text(item.subject)}</dt>" if item.subject else "")
        + "".join(f"<dd>{text(fact)}</dd>" for fact in item.text.split("; "))
        for item in items
    )
    return f'<dl class="facts">{entries}</dl>'
