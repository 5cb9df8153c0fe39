import pytest
import torch

from nystrom_papers.studies.approximation.real_heads.pictures import block_means, read_pictures, save_pictures
from nystrom_papers.studies.approximation.real_heads.recorded import LayerHeads


def layer_of(number, shown):
    x = torch.zeros(2, 3, 4, 1)
    return LayerHeads("pretrained", number, shown, x, x, x)


def test_a_long_axis_becomes_means_of_blocks_and_a_short_one_stays():
    x = torch.arange(512.0 * 6).reshape(512, 6)
    shorter = block_means(x)
    assert shorter.shape == (128, 6)
    torch.testing.assert_close(shorter[1], x[4:8].mean(dim=0))
    torch.testing.assert_close(block_means(torch.ones(300, 300)), torch.ones(128, 128))


def test_pictures_come_back_by_head_in_the_order_of_the_layers(tmp_path):
    values = torch.arange(24.0).reshape(2, 3, 2, 2)
    for layer, shown in ((10, (2,)), (9, (0, 1)), (3, ())):
        save_pictures(layer_of(layer, shown), {"exact": values, "error": values[..., 0, 0]}, tmp_path)
    found = read_pictures(tmp_path)
    assert list(found) == ["layer 10, head 1", "layer 10, head 2", "layer 11, head 3"]
    assert found["layer 11, head 3"]["exact"].tolist() == [[8, 9], [10, 11]]
    assert float(found["layer 10, head 2"]["error"]) == 4


def test_a_folder_without_pictures_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="its figure cannot be drawn: choose another --to"):
        read_pictures(tmp_path)
