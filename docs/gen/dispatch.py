"""docs/guide/backends.md: who goes first."""

from mla_fp8.dispatch import PREFERENCES, Preference


def preferences() -> str:
    rows = ["| op | GPU | layouts | heads | first | why |", "|---|---|---|---|---|---|"]
    for p in PREFERENCES:
        heads = "all" if p.q_heads == Preference.q_heads else f"{p.q_heads[0]} to {p.q_heads[-1]}"
        cells = [
            ", ".join(f"`{op}`" for op in p.ops), ", ".join(p.archs), ", ".join(p.layouts) or "all", heads,
            ", ".join(f"`{name}`" for name in p.order), p.why,
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def parts() -> dict[str, str]:
    return {"preferences": preferences()}
