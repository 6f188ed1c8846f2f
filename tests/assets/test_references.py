"""references.py: answers agree with references line by line, as JSON, or in their equations."""

import pytest

from assets.references import Reference

SUM = Reference("equations", "2 + 3 = 5, then 5 - 1 = 4. She has 4.")
OBJECT = Reference("json", '{"a": [1, 2]}')
CODE = Reference("lines", "```python\ndef f(a):\n    return a\n```")


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (SUM, "Now 2 + 3 = 5. Later 5 - 1 = 4 are left: 4", "2 + 3 = 5, then 5 - 1 = 4. She has 5."),
        (OBJECT, ' {"a":\n[1, 2]} ', '{"a": [2, 1]}'),
        (CODE, "Here:\n```python\ndef f(a):  \n    return a\n```\nDone.", "```python\ndef f(a):\nreturn a\n```"),
        (Reference("lines", "yes"), "yes\n", "no"),
    ],
)
def test_wording_and_layout_are_free_where_the_comparison_says_so(reference, right, wrong):
    assert reference.accepts(right) and not reference.accepts(wrong) and not reference.accepts("")
