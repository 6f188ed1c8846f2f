"""Draws docs/images/round.svg and docs/images/blocks.svg, the two figures of docs/method.md.

python docs/draw_figures.py
"""

import pathlib

IMAGES = pathlib.Path(__file__).parent / "images"
INK, SOFT, LINE = "#1f2328", "#59636e", "#8c959f"
BLUE, GREEN, ORANGE, RED, GREY, PALE = "#cfe3ff", "#cdeed3", "#ffe2b8", "#ffd1cc", "#e6e9ed", "#f6f8fa"


class Drawing:
    """SVG elements collected in order."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, label: str = "", fill: str = GREY, size: int = 15):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{LINE}"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + size * 0.35, label, size=size, anchor="middle")

    def text(self, x: float, y: float, label: str, size: int = 14, anchor: str = "start", colour: str = INK):
        label = label.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{label}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float):
        self.parts.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{LINE}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def draw_round() -> str:
    """One round with a shifted block of 6 slots: propose, correct, verify, accept."""
    made = Drawing(960, 472, "One round of Domino decoding")
    step, width, left = 84, 78, 350
    slots = [left + step * index for index in range(7)]

    def heading(y: int, name: str, note: str):
        made.text(20, y, name, size=16)
        made.text(20, y + 19, note, size=12.5, colour=SOFT)

    for index, word in enumerate(("The", "capital", "of")):
        made.box(left - step * (3 - index), 20, width, 32, word, GREEN)
    made.box(slots[0], 20, width, 32, "France", ORANGE)
    made.text(slots[1], 41, "← anchor: the last token the target chose", size=13, colour=SOFT)

    heading(96, "1  Backbone", "all slots in one pass; reads the target's")
    made.text(20, 130, "hidden states of the committed text", size=12.5, colour=SOFT)
    for index in range(6):
        made.box(slots[index], 86, width, 32, "mask" if index else "France", ORANGE if not index else GREY)
    made.box(slots[0], 128, slots[5] + width - slots[0], 28, "draft layers → z and base logits of every slot", PALE, 13)

    heading(200, "2  Domino head", "a GRU over the tokens chosen so far adds a")
    made.text(20, 234, "low-rank correction to each slot's logits", size=12.5, colour=SOFT)
    drafts = ("is", "Paris", ",", "a", "big", "city")
    for index, word in enumerate(drafts):
        made.arrow(slots[index] + width / 2, 157, slots[index] + width / 2, 188)
        made.box(slots[index], 190, width, 32, word, BLUE)
        if index:
            made.arrow(slots[index - 1] + width, 206, slots[index] - 1, 206)
    made.text(slots[0], 240, "from base logits alone", size=11.5, colour=SOFT)
    made.text(slots[2], 240, "each draft sees the ones before it →", size=11.5, colour=SOFT)

    heading(290, "3  Verification", "the frozen target reads anchor and drafts in")
    made.text(20, 324, "one pass; its choice after each is below", size=12.5, colour=SOFT)
    for index, word in enumerate(("France", *drafts)):
        made.box(slots[index], 276, width, 32, word, ORANGE if not index else BLUE if index < 4 else RED)
        made.arrow(slots[index] + width / 2, 309, slots[index] + width / 2, 330)
    chosen = ("is", "Paris", ",", "the", "city", "in", ".")
    for index, word in enumerate(chosen):
        made.box(slots[index], 332, width, 32, word, GREEN if index < 3 else ORANGE if index == 3 else PALE)

    heading(408, "4  Accept", "drafts are kept while they equal the target's")
    made.text(20, 442, "choice; that choice ends the round", size=12.5, colour=SOFT)
    for index, word in enumerate(chosen[:4]):
        made.box(slots[index], 394, width, 32, word, GREEN if index < 3 else ORANGE)
    made.text(slots[0], 446, "3 drafts accepted", size=13, colour=SOFT)
    made.text(slots[3], 446, "bonus token: the next anchor", size=13, colour=SOFT)
    made.text(slots[4] + 4, 415, "4 tokens for one pass of the target", size=15)
    return made.svg()


def draw_blocks() -> str:
    """Two training blocks of 4 slots on one row of 12 tokens: what each slot is labelled with, and what it reads."""
    tokens, anchors, size = 12, (3, 7), 4
    cell, left, top = 30, 150, 128
    made = Drawing(960, 430, "Training blocks: labels and attention mask")
    made.text(20, 34, "one row of tokens", size=13)
    made.text(20, 53, "anchors in orange", size=12.5, colour=SOFT)
    for t in range(tokens):
        made.box(left + cell * t, 20, cell - 2, 30, f"x{t}", ORANGE if t in anchors else GREEN, 13)
    made.text(left, 84, "keys: the row's context (the target's hidden states)", size=13, colour=SOFT)
    gap = 24
    block_left = left + cell * tokens + gap
    made.text(block_left, 84, "keys: slots of the blocks", size=13, colour=SOFT)
    for t in range(tokens):
        made.text(left + cell * t + cell / 2, top - 10, str(t), size=12, anchor="middle", colour=SOFT)
    for b in range(2):
        for k in range(size):
            x = block_left + cell * (b * size + k) + cell / 2
            made.text(x, top - 10, f"{'ab'[b]}{k}", size=12, anchor="middle", colour=SOFT)
    label_left = block_left + cell * 2 * size + gap
    made.text(label_left, 84, "label (shifted), weight", size=13, colour=SOFT)
    for b, anchor in enumerate(anchors):
        for k in range(size):
            y = top + cell * (b * size + k) + (10 if b else 0)
            made.text(20, y + 20, f"slot {'ab'[b]}{k}: {'x' + str(anchor) if k == 0 else 'mask'}", size=13)
            for t in range(tokens):
                made.box(left + cell * t, y, cell - 2, cell - 2, "", BLUE if t < anchor else PALE)
            for other in range(2):
                for j in range(size):
                    x = block_left + cell * (other * size + j)
                    made.box(x, y, cell - 2, cell - 2, "", BLUE if other == b else PALE)
            made.text(label_left, y + 20, f"x{anchor + 1 + k}    exp(−{k}/γ)", size=13)
    y = top + cell * 2 * size + 36
    made.box(left, y, 16, 16, "", BLUE)
    made.text(left + 24, y + 13, "may be read", size=13, colour=SOFT)
    rule = "Context strictly before the anchor; all slots of the same block; nothing of another block."
    made.text(left, y + 38, rule, size=13)
    return made.svg()


FIGURES = {"round.svg": draw_round, "blocks.svg": draw_blocks}


def main() -> None:
    for name, draw in FIGURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
