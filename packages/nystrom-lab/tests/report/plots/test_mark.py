import matplotlib
import numpy as np
import pytest
from PIL import Image

from nystrom_lab.data.show import write_grid
from nystrom_lab.report.plots.canvas import check_figure, figure_of, save_figure
from nystrom_lab.report.plots.mark import check_free


@pytest.mark.parametrize("ending", [".png", ".svg", ".SVG"])
def test_a_figure_is_drawn_anew_in_its_place_and_in_that_of_no_other_program(tmp_path, ending):
    figure, path = figure_of(1, 1), tmp_path / f"a{ending}"
    check_figure(path)
    save_figure(figure, path)
    before = path.read_bytes()
    check_figure(path)
    save_figure(figure, path)
    assert path.read_bytes() == before
    figure.savefig(path)
    with pytest.raises(ValueError, match=r"already exists and is not a picture that nystrom drew: choose another name"):
        check_figure(path)


def test_a_grid_of_pictures_is_drawn_anew_too(tmp_path):
    path, picture = tmp_path / "grid.png", np.zeros((2, 2), dtype=np.uint8)
    for _ in range(2):
        write_grid([picture], ["one"], path)
    Image.fromarray(picture).save(path)
    with pytest.raises(ValueError, match="is not a picture that nystrom drew"):
        write_grid([picture], ["one"], path)


@pytest.mark.parametrize("name", ["nystromformer", "a nystrom", "Nystrom"])
def test_the_mark_is_the_whole_name(tmp_path, name):
    figure = figure_of(1, 1)
    with matplotlib.rc_context({"svg.hashsalt": "a"}):
        figure.savefig(tmp_path / "a.svg", metadata={"Creator": name})
    figure.savefig(tmp_path / "a.png", metadata={"Software": name})
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match="is not a picture that nystrom drew"):
            check_free(path)
