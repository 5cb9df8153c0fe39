import torch

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import choose, cluster_sizes, cluster_sums, take_rows


def draw(n, *, h=1, d=5, seed=0):
    return torch.randn(1, h, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_heavy_keys_are_those_on_which_most_attention_falls():
    q, k = draw(64, seed=0), draw(64, seed=1)
    wanted = [3, 30, 61]
    q[..., 0] = 5.0
    k[:, :, wanted, 0] = 5.0
    chosen = choose(q, k, None, None, NearFarOptions(num_heavy=3, num_clusters=4))
    assert sorted(chosen.heavy[0, 0].tolist()) == wanted
    assert chosen.exists.all()
    assert (chosen.cluster[0, 0, wanted] == 4).all()


def test_clusters_hold_keys_that_are_near_each_other():
    g = torch.Generator().manual_seed(0)
    centres = 10 * torch.eye(4, dtype=torch.float64)
    kind = torch.randint(4, (300,), generator=g)
    k = (centres[kind] + 0.1 * torch.randn(300, 4, generator=g, dtype=torch.float64))[None, None]
    chosen = choose(k, k, None, None, NearFarOptions(num_heavy=0, num_clusters=8))
    for cluster in range(8):
        assert len(set(kind[chosen.cluster[0, 0] == cluster].tolist())) <= 1


def test_every_key_is_heavy_or_in_the_nearest_cluster_of_others():
    q, k = draw(50, h=2), draw(50, h=2, seed=1)
    chosen = choose(q, k, None, None, NearFarOptions(num_heavy=5, num_clusters=6, iterations=1))
    # With one step the centres are the means of segments of the tokens.
    segment = torch.arange(50) * 6 // 50
    centres = torch.stack([k[:, :, segment == j].mean(dim=2) for j in range(6)], dim=2)
    nearest = torch.cdist(k, centres).argmin(dim=-1)
    heavy = torch.zeros(1, 2, 50, dtype=torch.bool).scatter(2, chosen.heavy, True)
    assert heavy.sum() == 10
    assert torch.equal(chosen.cluster, torch.where(heavy, 6, nearest))


def test_more_steps_bring_the_keys_nearer_to_their_centres():
    k = draw(2000, d=3)

    def spread(iterations):
        chosen = choose(k, k, None, None, NearFarOptions(num_heavy=0, num_clusters=8, iterations=iterations))
        sizes = cluster_sizes(k, chosen.cluster, 8)
        means = cluster_sums(k, chosen.cluster, 8) / sizes.clamp(min=1)[..., None]
        return (k - take_rows(means, chosen.cluster)).norm().item()

    assert spread(6) < spread(2) < spread(1)


def test_a_sequence_with_fewer_keys_than_heavy_ones_finds_those_it_has():
    q = draw(9)
    keep = torch.arange(9)[None] < 2
    real = q * keep[:, None, :, None]
    chosen = choose(real, real, keep, keep, NearFarOptions(num_heavy=4, num_clusters=3))
    assert chosen.exists.sum() == 2
    assert set(chosen.heavy[chosen.exists].tolist()) == {0, 1}
    assert (chosen.cluster == 3).all()
