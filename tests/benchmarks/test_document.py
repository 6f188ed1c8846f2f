"""benchmarks/document.py: the sections and tables that scripts write into pages."""

from benchmarks.document import changes_of, put_section, say_changes, say_seeds, table_lines


def test_a_section_is_replaced_between_its_marks_and_appended_without(tmp_path):
    page = tmp_path / "docs" / "page.md"
    put_section(page, "one", "first\n")
    page.write_text("# Title\n" + page.read_text() + "\nrest\n")
    put_section(page, "two", "second")
    put_section(page, "one", "third")
    assert page.read_text() == (
        "# Title\n\n<!-- one: begin -->\nthird\n<!-- one: end -->\n\nrest\n\n"
        "<!-- two: begin -->\nsecond\n<!-- two: end -->\n"
    )


def test_several_seeds_are_their_mean_and_half_their_range():
    assert say_seeds([1.0, 2.0, 1.5]) == "1.50 ± 0.50" and say_seeds([1.25], ".3f") == "1.250"


def test_seeds_are_compared_one_by_one():
    changes = changes_of([1.1, 3.0], [1.0, 2.0])
    assert say_changes(changes) == "30.0 % above (by seed +10.0, +50.0)"
    assert say_changes(changes_of([1.5], [2.0])) == "25.0 % below"
    assert say_changes(changes_of([2.0, 3.0], [2.0, 3.0])) == "equal to (by seed +0.0, +0.0)"


def test_a_table_has_its_numbers_to_the_right():
    assert table_lines(["name", "kind", "τ"], [["a", "b", "1.5"]], texts=2) == [
        "| name | kind | τ |",
        "| --- | --- | ---: |",
        "| a | b | 1.5 |",
    ]
