"""Images and camera slots, against pictures worked out by hand."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional

from vla_async.policies.images import Cameras, center_crop, resize, resize_with_pad, standardize, to_unit_range


def test_bytes_become_the_range_from_minus_one_to_one():
    image = torch.tensor([0, 255, 51], dtype=torch.uint8)
    torch.testing.assert_close(to_unit_range(image), torch.tensor([-1.0, 1.0, -0.6]))
    assert to_unit_range(torch.tensor([0.3])).item() == pytest.approx(0.3)


def test_an_image_of_the_right_size_is_only_scaled():
    image = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(resize(image, 8, 8), to_unit_range(image))
    assert torch.equal(resize_with_pad(image, 8, 8), to_unit_range(image))


def test_antialiasing_averages_over_all_pixels():
    """Without it, a bilinear pixel of a smaller image sees only the two nearest rows; with it, a triangle around them."""
    image = torch.zeros(1, 1, 8, 8)
    image[..., 2, :] = 1.0
    rough, smooth = resize(image, 2, 2, antialias=False), resize(image, 2, 2, antialias=True)
    assert rough[0, 0, :, 0].tolist() == [0.5, 0.0]
    # a triangle of width 4 around row 2 and row 6, cut at the border: weights of row 2 by hand
    weights = torch.tensor([1 - abs(row + 0.5 - 2.0) / 4.0 for row in range(8)]).clamp(min=0.0)
    far = torch.tensor([1 - abs(row + 0.5 - 6.0) / 4.0 for row in range(8)]).clamp(min=0.0)
    expected = [float(weights[2] / weights.sum()), float(far[2] / far.sum())]
    torch.testing.assert_close(smooth[0, 0, :, 0], torch.tensor(expected))


@pytest.mark.parametrize(
    ("where", "rows"),
    [("center", [-1.0, 1.0, 1.0, 1.0, -1.0, -1.0]), ("left_top", [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])],
)
def test_a_wide_image_is_padded_above_and_below(where, rows):
    """12 x 6 into 6 x 6: the ratio is 2, 3 rows of 6 remain, 3 are filled (1 above and 2 below, or all above)."""
    image = torch.full((1, 3, 6, 12), 255, dtype=torch.uint8)
    made = resize_with_pad(image, 6, 6, where=where)
    assert made.shape == (1, 3, 6, 6)
    assert made[0, 0, :, 3].tolist() == rows
    assert torch.equal(made[0, 0].amin(-1), made[0, 0].amax(-1))


def test_a_tall_image_is_padded_left_and_right_with_the_given_value():
    made = resize_with_pad(torch.full((1, 1, 8, 4), 255, dtype=torch.uint8), 4, 4, pad_value=0.25)
    assert made[0, 0, 0].tolist() == [0.25, 1.0, 1.0, 0.25]


def test_an_enlarged_image_is_the_plain_bilinear_one():
    image = torch.rand(2, 3, 5, 5) * 2.0 - 1.0
    expected = functional.interpolate(image, (9, 9), mode="bilinear", align_corners=False)
    torch.testing.assert_close(resize_with_pad(image, 9, 9, antialias=False), expected)


def test_bicubic_overshoot_stays_in_range():
    image = torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
    image[..., 2:] = 255
    made = resize(image, 16, 16, "bicubic")
    assert made.min() == -1.0
    assert made.max() == 1.0


def test_leading_dimensions_are_kept():
    image = torch.randint(0, 256, (2, 4, 3, 6, 10), dtype=torch.uint8)
    made = resize_with_pad(image, 8, 8)
    assert made.shape == (2, 4, 3, 8, 8)
    torch.testing.assert_close(made[1, 2], resize_with_pad(image[1, 2].unsqueeze(0), 8, 8)[0])


def test_the_crop_is_the_middle():
    image = torch.arange(100).reshape(1, 1, 10, 10)
    made = center_crop(image, 0.64)
    assert made.shape == (1, 1, 8, 8)
    assert made[0, 0, 0, 0] == 11
    assert torch.equal(center_crop(image, 1.0), image)
    with pytest.raises(ValueError, match=r"area=1.5"):
        center_crop(image, 1.5)


def test_channels_are_standardised_by_statistics_of_the_range_from_zero_to_one():
    image = torch.tensor([0.0, 1.0, -1.0]).reshape(1, 3, 1, 1)  # 0.5, 1 and 0 in [0, 1]
    made = standardize(image, (0.5, 0.4, 0.2), (1.0, 0.3, 0.1))
    torch.testing.assert_close(made.flatten(), torch.tensor([0.0, 2.0, -2.0]))


ENV = {"image": (3, 4, 4), "wrist_image": (3, 4, 4)}
SLOTS = ("base", "left_wrist", "right_wrist")


def test_cameras_show_the_mapped_images_in_the_models_order_and_mask_the_others():
    cameras = Cameras(SLOTS, ENV, {"left_wrist": "image", "base": "wrist_image"}, allow_missing=True)
    images = {
        name: torch.full((2, *shape), value, dtype=torch.uint8)
        for (name, shape), value in zip(ENV.items(), (7, 9), strict=True)
    }
    shown, mask = cameras.read(TensorDict({"observation": images}, [2]))
    assert [int(image.unique()) for image in shown] == [9, 7, 0]
    assert mask.tolist() == [[True, True, False]] * 2
    assert cameras.sources == ("wrist_image", "image", None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mapping": {"base": "image"}}, r"no images for 'left_wrist' .*'right_wrist'.*have \['image', 'wrist_image'\]"),
        ({"mapping": {"base": "front"}, "allow_missing": True}, "none of the model's slots"),
        ({"mapping": {"top": "image"}}, "the model has no slots \\['top'\\]"),
        ({"mapping": {"base": "depth"}, "available": {"depth": (1, 4, 4)}}, "'depth' has 1 channels, but 'base' needs 3"),
    ],
)
def test_cameras_that_do_not_fit_are_refused_by_name(options, said):
    with pytest.raises(ValueError, match=said):
        Cameras(SLOTS, options.pop("available", ENV), **options)
