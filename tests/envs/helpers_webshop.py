"""An oracle for WebShop: it knows the goal's product, and buys it through the pages."""


def buy_the_goal(suite, env, task):
    """Search by title, page to the product, choose the goal's options, buy. Returns the last info, the reward and the number of turns."""
    goal = suite.goal(task)
    env.reset(options={"task": task})
    commands = [f"search[{goal.product.title}]"]
    wanted, turns = f"click[{goal.product.asin.lower()}]", 0
    tail = [wanted, *(f"click[{option}]" for option in goal.options), "click[buy now]"]
    info = {"admissible_commands": []}
    while commands:
        _, reward, over, _, info = env.step(commands.pop(0))
        turns += 1
        assert not info["invalid"]
        if over:
            return info, reward, turns
        if not commands:
            if wanted in info["admissible_commands"]:
                commands, tail = tail, []
            else:
                commands = ["click[next >]"]
    raise AssertionError("the oracle ran out of commands")
