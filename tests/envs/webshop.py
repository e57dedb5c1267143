"""WebShop: pages, search, reward cases worked by hand, goals, and an oracle's sessions. Run by `make test-envs`: needs the extra `webshop`."""

import json
import re
import subprocess
import sys

import pytest
from helpers_webshop import buy_the_goal

from sapo_fast.envs import make_suite
from sapo_fast.envs.webshop import WebShop
from sapo_fast.envs.webshop_data import read_catalogue
from sapo_fast.envs.webshop_generator import main, make_products
from sapo_fast.envs.webshop_reward import Goal, Product, color, matched_attributes, matched_options, noun_rule, score, type_factor
from sapo_fast.envs.webshop_search import Analyzer, SearchIndex

WORDS = noun_rule("words")[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("webshop")
    assert main([str(folder), "--products", "300", "--seed", "3"]) == 0
    return folder


@pytest.fixture(scope="module")
def suite(data):
    return WebShop(str(data), n_eval=200)


def product(
    title="Acme Classic Tea Kettle", query="kettles", path="Home › Kitchen › Kettles", attributes=(), bullets=(), description="", asin="B1"
):
    return Product(asin, title, query, frozenset(path.split(" › ")), tuple(attributes), tuple(bullets), description)


def goal(product, attributes=("tea tree",), options=(), limit=40.0):
    return Goal(product, "", tuple(attributes), tuple(options), limit)


# ---- the reward, by hand ------------------------------------------------------------------------------------------------------------------------


def test_a_perfect_purchase():
    kettle = product(attributes=["stainless steel", "fast boiling"])
    found = score(
        kettle, goal(kettle, ["stainless steel", "fast boiling"], ["red", "2 quart"]), 39.99, {"color": "red", "size": "2 quart"}, WORDS
    )
    assert (found.total, found.type, found.attributes, found.options, found.price) == (1.0, 1.0, 2, 2, True)


@pytest.mark.parametrize(
    ("price", "chosen", "attributes", "expected"),
    [
        (40.0, {"color": "red", "size": "2 quart"}, 2, 5 / 5),  # at the limit is within it
        (40.01, {"color": "red", "size": "2 quart"}, 2, 4 / 5),
        (30.0, {"color": "blue", "size": "2 quart"}, 2, 4 / 5),
        (30.0, {"color": "red", "size": "2 quarts"}, 2, 4 / 5),  # sizes match exactly or not at all
        (30.0, {}, 2, 3 / 5),
        (50.0, {}, 0, 0.0),
        (30.0, {"color": "red"}, 1, 3 / 5),
    ],
)
def test_the_sum_of_parts(price, chosen, attributes, expected):
    wanted = ["stainless steel", "fast boiling"]
    kettle = product(attributes=wanted[:attributes])
    assert score(kettle, goal(kettle, wanted, ["red", "2 quart"]), price, chosen, WORDS).total == pytest.approx(expected, abs=1e-12)


def test_attributes_match_fuzzily_or_in_the_texts():
    assert (
        matched_attributes(
            product(attributes=["essential oil", "natural ingredients"]), ["tea tree", "essential oils", "natural ingredients"]
        )
        == 2
    )
    assert (
        matched_attributes(
            product(bullets=["With essential oils"], description="Natural Ingredients."), ["essential oils", "natural ingredients"]
        )
        == 2
    )
    assert matched_attributes(product(title="Tea Tree Soap"), ["tea tree", "vegan"]) == 1
    assert matched_attributes(product(attributes=["tea bag", "earl gray"]), ["tea tree", "essential oils"]) == 0


def test_options():
    assert matched_options(product(), ["cool powder snow", "pack of 12"], {"style": "powder snow", "count": "pack of 12"}) == 2
    assert matched_options(product(), ["grey", "xl"], {"color": "blue", "size": "xl"}) == 1
    assert matched_options(product(), [], {"color": "blue"}) == 0
    assert matched_options(product(title="Blue kettle"), [], {"color": "blue"}) == 0, "no more than the goal asks for"
    assert matched_options(product(), ["red"], {"color": "red", "trim": "red"}) == 1
    assert matched_options(product(bullets=["also in navy"]), ["red"], {"color": "navy"}) == 1, "a chosen value that the texts hold counts"
    assert color("midnight blue") == "blue" and color("pack of 3") == "pack of 3"
    assert matched_options(product(), ["light blue"], {"color": "dark blue"}) == 1, "the first color word decides"


def test_the_type_factor():
    kettle = product("Acme Classic Tea Kettle Steel Whistle")  # nouns by the words rule: acme classic tea kettle steel whistle
    wanted = goal(kettle)
    assert type_factor(kettle, wanted, WORDS) == 1.0
    other = {"query": "pots", "path": "Sports › Golf"}
    assert type_factor(product("Zeta Tea Kettle", **other), wanted, WORDS) == 1.0  # 2 of 6
    assert type_factor(product("Zeta Tea Pot", **other), wanted, WORDS) == 0.5  # 1 of 6, nothing else alike
    assert type_factor(product("Zeta Tea Pot", path="Kitchen › Home", query="pots"), wanted, WORDS) == 1.0  # two categories
    assert type_factor(product("Zeta Tea Pot", path="Kitchen › Golf", query="pots"), wanted, WORDS) == 0.5  # one
    assert type_factor(product("Zeta Tea Pot", query="kettles", path="Golf"), wanted, WORDS) == 1.0  # the query
    assert type_factor(product("Golf Club"), wanted, WORDS) == 0.0  # no noun, though query and path agree
    long = goal(product(" ".join(f"{letter}{letter}" for letter in "abcdefghijkl")))  # 12 nouns
    assert type_factor(product("aa"), long, WORDS) == 0.1
    assert type_factor(product("for the", **other), goal(product("with 100")), WORDS) == 0.5, "a goal without nouns counts as 0.2"


def test_the_words_rule():
    assert WORDS("2-Pack Natural Bamboo Cutting Boards for the Kitchen, 12 inch") == {"pack", "bamboo", "cutting", "boards", "kitchen"}
    assert noun_rule("auto")[0] == "words" or noun_rule("auto")[0].startswith("spacy:")
    with pytest.raises(ValueError, match="auto, spacy, words"):
        noun_rule("nouns")


# ---- search ---------------------------------------------------------------------------------------------------------------------------------------


def test_analysis_is_lucenes():
    assert Analyzer().terms("The Women's running shoes, in U.S. sizes: 7.5") == ["women", "run", "shoe", "u.", "size", "7.5"]


def test_scores_are_lucenes_bm25():
    from math import log

    documents = ["red kettle", "red red pot of steel", "blue pan"]
    index = SearchIndex(documents)
    lengths, average, k1, b = [2, 4, 2], 8 / 3, 0.9, 0.4
    idf = log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    expected = [idf * tf / (tf + k1 * (1 - b + b * length / average)) for tf, length in zip([1, 2, 0], lengths, strict=True)]
    assert index._index.get_scores(["red"]).tolist() == pytest.approx(expected, rel=1e-6)
    assert index.search("red") == [1, 0] and index.search("blue kettle") == [0, 2] and index.search("nothing of that") == []


def test_equal_scores_keep_the_documents_order():
    index = SearchIndex(["same words here"] * 80 + ["same words here rare"])
    assert index.search("same") == list(range(50)) and index.search("rare same")[0] == 80


# ---- the shop -------------------------------------------------------------------------------------------------------------------------------------


def test_pages_and_buttons(suite):
    env, task = suite.make(), suite.eval_tasks()[0]
    text, info = env.reset(options={"task": task})
    assert text == f"WebShop [SEP] Instruction: [SEP] {info['task']} [SEP] Search" and info["admissible_commands"] == ["search[<keywords>]"]
    text, reward, over, truncated, info = env.step("search[made for every day, brown running shoe]")
    head = f"Instruction: [SEP] {info['task']} [SEP] Back to Search [SEP] "
    assert text.startswith(head + "Page 1 (Total results: ") and (reward, over, truncated) == (0.0, False, False)
    links = [c for c in info["admissible_commands"] if re.fullmatch(r"click\[b\d{9}\]", c)]
    assert len(links) == 10 and info["admissible_commands"][:2] == ["click[back to search]", "click[next >]"]
    second = env.step("click[next >]")[0]
    assert "Page 2 " in second and "< Prev" in second and env.step("click[< prev]")[0] == text
    item_page, _, _, _, info = env.step(links[3].upper())
    assert item_page.startswith(head + "< Prev [SEP] ") and item_page.endswith(
        "[SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert "click[buy now]" in info["admissible_commands"] and "click[attributes]" not in info["admissible_commands"]
    for name in ("description", "features", "reviews"):
        assert env.step(f"click[{name}]")[4]["admissible_commands"] == ["click[back to search]", "click[< prev]"]
        assert env.step("click[< prev]")[0] == item_page
    assert env.step("click[< prev]")[0] == text, "back to the same results"
    assert env.step("click[back to search]")[0].startswith("WebShop")


@pytest.mark.parametrize(
    "command", ["", "buy now", "click[]", "search[]", "click[buy now]", "click[B000000000]", "click[next >]", "click[search]", "search red"]
)
def test_a_bad_command_changes_nothing(suite, command):
    env = suite.make()
    text, info = env.reset(options={"task": "goal-5"})
    found, reward, over, _, after = env.step(command)
    assert found == text and reward == 0.0 and not over and after["invalid"] and not after["won"]
    assert after["admissible_commands"] == info["admissible_commands"]


def test_options_are_forgotten_when_the_product_is_left(suite):
    env, task = suite.make(), suite.eval_tasks()[0]
    goal = suite.goal(task)
    item = suite.catalogue.by_asin[goal.product.asin]
    env.reset(options={"task": task})
    env.step(f"search[{goal.product.title}]")
    env.step(f"click[{goal.product.asin}]")
    for value in goal.options:
        env.step(f"click[{value}]")
    assert list(env._session.chosen.values()) == [v for name in sorted(item.options) for v in goal.options if v in item.options[name]]
    env.step("click[description]")
    env.step("click[< prev]")
    assert env._session.chosen, "a look at the description forgets nothing"
    env.step("click[< prev]")
    env.step(f"click[{goal.product.asin}]")
    info = env.step("click[buy now]")[4]
    assert info["parts"].options == 0 and not info["won"]
    with pytest.raises(RuntimeError, match="reset"):
        env.step("click[buy now]")


def test_the_score_as_reward_and_an_attributes_page(data):
    suite = WebShop(str(data), n_eval=50, reward="score", attributes_page=True, instruction_on_pages=False, admissible=False)
    env = suite.make()
    goal = suite.goal("goal-0")
    text, info = env.reset(options={"task": "goal-0"})
    assert text == "WebShop [SEP] Search" and info["task"] == goal.instruction and "admissible_commands" not in info
    env.step(f"search[{goal.product.title}]")
    env.step(f"click[{goal.product.asin}]")
    text = env.step("click[attributes]")[0]
    assert all(attribute in text for attribute in goal.product.attributes)
    env.step("click[< prev]")
    _, reward, over, _, info = env.step("click[buy now]")
    parts = info["parts"]
    assert over and reward == info["score"] == parts.total
    assert 0 < reward < 1 and parts.total == pytest.approx((len(goal.attributes) + 1) / (len(goal.attributes) + len(goal.options) + 1))


def test_an_oracle_wins_every_goal(suite):
    env = suite.make()
    tasks = [*suite.eval_tasks(), *suite.train_tasks()][:1000]
    assert len(tasks) == 1000
    for task in tasks:
        info, reward, turns = buy_the_goal(suite, env, task)
        assert info["score"] == reward == 1.0 and info["won"] and turns <= 15, task


def test_flat_memory_over_many_sessions(suite):
    def resident():
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

    env, tasks = suite.make(), suite.train_tasks()
    for task in tasks[:500]:
        buy_the_goal(suite, env, task)
    before = resident()
    for i in range(3000):
        buy_the_goal(suite, env, tasks[i % len(tasks)])
    assert resident() - before < 8 * 1024, "KiB"


# ---- goals and files ---------------------------------------------------------------------------------------------------------------------------


def test_the_manifest_is_fixed_and_disjoint(data, suite):
    goals = suite.catalogue.goals
    keys = {(g.product.asin, g.instruction, g.attributes, g.options) for g in goals}
    assert len(keys) == len(goals) > 1000 and not set(suite.eval_tasks()) & set(suite.train_tasks())
    assert WebShop(str(data), n_eval=200).report == suite.report
    command = "import sys, random; random.seed(99); from sapo_fast.envs.webshop import WebShop; print(WebShop(sys.argv[1], n_eval=200).report['manifest'])"
    other = subprocess.run([sys.executable, "-c", command, str(data)], capture_output=True, text=True, check=True).stdout.strip()
    assert other == suite.report["manifest"], "the same in another process, whatever its random state"
    assert read_catalogue(data, "small", False, 1).digest() != other, "another seed, other goals"
    for g in goals[:300]:
        item = suite.catalogue.by_asin[g.product.asin]
        assert g.price_upper > item.price and f"lower than {g.price_upper:.2f} dollars" in g.instruction


def test_written_goals(data):
    suite = make_suite("webshop", {"data": str(data), "human_goals": True, "n_eval": 50})
    assert len(suite.catalogue.goals) == 300 and all(g.instruction.startswith("i am looking for") for g in suite.catalogue.goals)
    info, reward, _ = buy_the_goal(suite, suite.make(), suite.eval_tasks()[7])
    assert reward == 1.0 and info["won"]


def test_products_are_a_function_of_the_seed():
    assert make_products(5, 1) == make_products(5, 1) and make_products(5, 1) != make_products(5, 2)
    assert json.dumps(make_products(8, 1)[0][:5]) == json.dumps(make_products(5, 1)[0]), "more products change none"
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make_products(0, 1)


def test_bad_input(data, tmp_path, monkeypatch):
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    for options, message in (
        ({}, "no data folder given.*webshop_generator"),
        ({"data": str(tmp_path / "none")}, "does not exist"),
        ({"data": str(tmp_path)}, r"has no items_shuffle_1000\.json.*setup\.sh"),
        ({"data": str(data), "n_eval": 10**6}, "n_eval must leave some"),
        ({"data": str(data), "n_eval": 0}, "n_eval must be an integer >= 1"),
        ({"data": str(data), "products": "large"}, "'large'"),
        ({"data": str(data), "reward": "sucess"}, "did you mean 'success'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_suite("webshop", options)
    (tmp_path / "items_shuffle_1000.json").write_text("[{")
    with pytest.raises(ValueError, match=r"items_shuffle_1000\.json is broken"):
        WebShop(str(tmp_path))
    (tmp_path / "items_shuffle_1000.json").write_text('[{"asin": "B1"}]')
    (tmp_path / "items_ins_v2_1000.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, where WebShop has a dict"):
        WebShop(str(tmp_path))
    (tmp_path / "items_ins_v2_1000.json").write_text("{}")
    with pytest.raises(ValueError, match="product 0, is not as WebShop's: KeyError: 'small_description'"):
        WebShop(str(tmp_path))
    monkeypatch.setenv("WEBSHOP_DATA", str(data))
    with pytest.raises(ValueError, match="no task 'goal-x'; ids are goal-0 to goal-"):
        WebShop().make().reset(options={"task": "goal-x"})
