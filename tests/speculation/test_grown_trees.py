"""Trees that grow where the drafter is unsure: lossless, within their limits, and branching where it pays."""

import pytest

from offload import EngineConfig
from offload.api.loader import open_model
from offload.errors import SettingsError
from offload.events import Speculated
from offload.sequence import TokenSequence
from offload.settings.config import Sampling, Speculation
from offload.settings.tree_settings import GROWN_CHILDREN
from offload.speculation.auto.adaptive import AdaptiveScheduler, Cycle
from offload.speculation.drafters import grown_tree
from offload.speculation.drafters.drafter import ModelDrafter, SelectedDrafter
from offload.speculation.drafters.grown_tree import TRAINED, Growth
from offload.speculation.sampling.noise import Noise
from offload.speculation.trees.tree import NOTHING, ROOT, tree_of
from tests.support.engine import GREEDY, run, tokens
from tests.support.heads import LAYERS, save_eagle3
from tests.support.models import ids, make_hf_model
from tests.support.table_models import MIDDLE, PROMPT, TableRunner, hierarchy, p_value

SIGNIFICANCE, T1 = 1e-3, Sampling(temperature=1, top_p=1)


@pytest.mark.daily("retrieval-none-6-400", "auto-lookup-*", "naive-*")
@pytest.mark.parametrize(
    ("method", "draft", "nodes", "runs"),
    [
        ("retrieval", "none", 6, 400),
        ("auto", "lookup", 9, 400),
        ("naive", "good", 40, 400),
        pytest.param("naive", "good", 40, 20_000, marks=pytest.mark.long),
        pytest.param("auto", "good", 40, 20_000, marks=pytest.mark.long),
        pytest.param("retrieval", "none", 6, 20_000, marks=pytest.mark.long),
        pytest.param("triforce", "good", 12, 20_000, marks=pytest.mark.long),
    ],
)
def test_the_first_three_tokens_are_distributed_as_in_plain_decoding(method, draft, nodes, runs):
    top = hierarchy(method, draft, T1, tree=f"grown:{nodes}").top
    assert p_value(top, T1, runs) > SIGNIFICANCE
    assert any(row.trees is not None and row.accepted for row in top.statistics.values())


def test_children_in_another_order_than_they_were_drawn_in_are_detected(monkeypatch):
    """Sorted by their numbers, say, they are no draws without replacement, and what is emitted is not the target's."""
    extend = grown_tree._Nodes.extend
    monkeypatch.setattr(
        grown_tree._Nodes,
        "extend",
        lambda self, drawn, chances, room: extend(self, [sorted(each) for each in drawn], chances, room),
    )
    top = hierarchy("retrieval", "none", T1, gammas=(None, 2), tree="grown:6").top
    assert p_value(top, T1, 400) < SIGNIFICANCE


def decoded(method, noise, **settings):
    top, sequence = hierarchy(method, "none", T1, noise=noise, **settings).top, TokenSequence(PROMPT)
    while len(sequence) < len(PROMPT) + 40:
        top.advance(sequence, len(PROMPT) + 40 - len(sequence))
        sequence.commit()
    return sequence.tokens, top


@pytest.mark.parametrize("seed", range(3))
def test_coupled_sampling_gives_plain_decodings_tokens(seed):
    plain, _ = decoded("ar", Noise(seed))
    grown, top = decoded("retrieval", Noise(seed), tree="grown")
    assert grown == plain
    (row,) = (row for row in top.statistics.values() if row.trees is not None)
    assert row.trees.accepted > row.trees.verifications  # more than one token of a tree


def drafter(nodes):
    sampler = hierarchy("retrieval", "none", T1).top._verifier._sampler
    runner = TableRunner(MIDDLE.softmax(2))
    runner.setups = 0
    return SelectedDrafter("retrieval", runner, sampler, nodes=nodes), TokenSequence(PROMPT)


@pytest.mark.parametrize(("nodes", "limit"), [(1, 5), (2, 5), (7, 3), (20, 4), (63, 30)])
def test_a_tree_has_so_many_nodes_and_is_so_deep_at_most(nodes, limit):
    proposing, sequence = drafter(nodes)
    for _ in range(10):
        draft = proposing.propose(sequence, limit)
        tree = tree_of(draft.parents)
        assert 1 <= len(draft.tokens) == len(tree) <= nodes
        assert 1 <= tree.depth <= limit
        for head, children in enumerate(tree.children):
            assert len({draft.tokens[child] for child in children}) == len(children) <= GROWN_CHILDREN
            if children:
                assert draft.rows[head].sum() == pytest.approx(1)
    assert sequence.tokens == PROMPT


def test_a_node_of_which_the_drafter_is_sure_has_one_child():
    growth = Growth(63)
    assert len(growth.children(0.99, 1.0)) == 1
    assert len(growth.children(0.4, 1.0)) > 1
    assert len(growth.children(0.4, 0.01)) == 1  # hardly ever reached


def test_what_is_believed_of_unsure_nodes_follows_from_the_text():
    """Here second children of unsure nodes are always right."""
    growth, sequence = Growth(20), TokenSequence([1])
    before = growth.children(0.4, 1.0)
    for _ in range(10):
        growth.note(len(sequence), [5, 6], (ROOT, ROOT), {ROOT: 0.4})
        sequence.extend([6, 9])
        growth.learn(sequence)
    after = growth.children(0.4, 1.0)
    assert after[0] < before[0]
    assert growth.children(0.95, 1.0)[0] > 0.9  # of another class


def test_branches_are_rarer_where_trees_have_no_room_for_them():
    counts = [len(Growth(nodes).children(0.4, 0.7)) for nodes in (4, 63, 400)]
    assert counts == [1, 2, 3]


def test_a_draft_model_s_nodes_bring_more_than_their_rows_and_passes_cost():
    free, dear = (Growth(63, TRAINED, row_cost, 0.1) for row_cost in (0.0, 0.15))
    assert [len(growth.children(0.2, 1.0)) for growth in (free, dear)] == [3, 1]
    assert [len(growth.children(0.2, 0.3)) for growth in (free, dear)] == [2, 1]
    assert [growth.heads([0, 1], {0: 0.47, 1: 0.17}, 9) for growth in (free, dear)] == [[0, 1], []]
    assert dear.heads([0, 1], {0: 0.9, 1: 0.05}, 9) == [0]


def test_a_head_s_trees_give_plain_decoding_s_tokens(tmp_path, monkeypatch):
    """Greedy and coupled, with a real head, whose trees branch since rows cost nothing."""
    monkeypatch.setattr(grown_tree, "_WORTH", 0.0)
    make_hf_model("llama", num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    head = save_eagle3(tmp_path / "head")
    opened = open_model(
        EngineConfig(str(tmp_path), device="cpu", dtype="float32"), speculation=Speculation("naive", str(head))
    )
    engine, prompt = opened.load(), ids(60)
    for sampling in (GREEDY, Sampling(temperature=1, coupled=True)):
        events = run(engine, prompt, 24, "naive", "model", sampling, tree="grown", gamma2=4)
        assert tokens(events) == tokens(run(engine, prompt, 24, sampling=sampling))
        trees = [event for event in events if isinstance(event, Speculated)][-1].levels[-1].trees
        assert trees.nodes > trees.depth  # they branch


def test_nodes_that_are_hardly_ever_reached_are_not_run():
    growth = Growth(63)
    assert growth.heads([3, 4, 5], {3: 0.5, 4: 0.001, 5: 0.3}, 10) == [3, 5]
    assert growth.heads([3, 4, 5], {3: 0.5, 4: 0.4, 5: 0.3}, 2) == [3, 4]
    assert growth.heads([3], {3: 0.03}, 10) == []  # another pass is not worth it
    assert growth.heads([3], {3: 0.5}, 0) == []


def test_drafts_may_be_as_long_as_a_tree_that_grows():
    assert Speculation(gamma2=48, tree="grown").gamma2 == 48
    with pytest.raises(SettingsError, match="gamma2 is 48"):
        Speculation(gamma2=48)


def test_a_tree_doubles_until_the_time_of_its_rows_is_known():
    """And shrinks again where they take long."""
    growth = Growth(63, TRAINED, 0.15, 0.1)
    runner = TableRunner(MIDDLE.softmax(2))
    sampler = hierarchy("retrieval", "none", T1).top._verifier._sampler
    proposing, sequence = ModelDrafter(runner, sampler, growth=growth), TokenSequence(PROMPT)
    scheduler, sizes = AdaptiveScheduler([proposing]), []
    for number in range(12):
        _, depth = scheduler.choose(sequence, 30)
        draft = proposing.propose(sequence, depth) if depth else NOTHING
        seconds = 1.0 if number < 6 else 0.5 * (1 + len(draft.tokens))
        sizes.append((growth.nodes, len(draft.tokens)))
        cycle = proposing if draft.tokens else None, 0, draft.depth, 0, 1e-3, seconds, False, False, draft.parents
        scheduler.observe(Cycle(*cycle))
    assert sizes[1][0] == 8 < max(nodes for nodes, _ in sizes)
    assert sizes[-1][1] < max(count for _, count in sizes[:7])
