"""Selection of the examples of a data set that a run uses."""

from rl_apps.settings.data import held_out_rows


def test_held_out_rows_samples_the_whole_file_in_order():
    rows = [{"number": number} for number in range(1000)]
    numbers = [row["number"] for row in held_out_rows(rows, 100)]

    assert numbers == sorted(set(numbers))
    assert len(numbers) == 100
    assert 400 < sum(numbers) / 100 < 600
    assert numbers == [row["number"] for row in held_out_rows(rows, 100)]
    assert held_out_rows(rows, 1000) == held_out_rows(rows, 5000) == rows
