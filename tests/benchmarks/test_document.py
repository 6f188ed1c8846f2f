"""benchmarks/document.py: the sections and tables that scripts write into pages."""

from benchmarks.document import put_section, say_seeds, table_lines


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


def test_a_table_has_its_numbers_to_the_right():
    assert table_lines(["name", "kind", "τ"], [["a", "b", "1.5"]], texts=2) == [
        "| name | kind | τ |",
        "| --- | --- | ---: |",
        "| a | b | 1.5 |",
    ]
