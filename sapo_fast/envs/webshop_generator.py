"""Products and instructions in WebShop's own file format, made up: everything about WebShop runs with no download.

    python -m sapo_fast.envs.webshop_generator FOLDER [--products 1000] [--seed 0]

writes items_shuffle_1000.json, items_ins_v2_1000.json and items_human_ins.json (whatever the number of products).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# family: search query, category path, things, attributes, option names
_COLORS = ["black", "white", "navy blue", "dark green", "red", "light grey", "pink", "brown", "purple", "yellow", "burgundy", "teal"]
_SIZES = ["x-small", "small", "medium", "large", "x-large", "xx-large"]
_FAMILIES: tuple[tuple[str, str, str, str, str, str], ...] = (
    (
        "women's tops",
        "fashion",
        "Clothing, Shoes & Jewelry › Women › Clothing › Tops",
        "blouse,tunic,tank top,cardigan,hooded sweatshirt,turtleneck sweater",
        "machine wash,long sleeve,short sleeve,loose fit,soft material,hand wash,polyester spandex,quick drying",
        "color,size",
    ),
    (
        "men's shoes",
        "fashion",
        "Clothing, Shoes & Jewelry › Men › Shoes",
        "running shoe,hiking boot,loafer,canvas sneaker,leather sandal,slipper",
        "rubber sole,non slip,ethylene vinyl,memory foam,arch support,lace closure,water resistant",
        "color,size",
    ),
    (
        "living room furniture",
        "garden",
        "Home & Kitchen › Furniture › Living Room Furniture",
        "coffee table,bookshelf,ottoman,accent chair,end table,storage bench",
        "easy assembly,solid wood,steel frame,mid century,space saving,storage space,faux leather",
        "color",
    ),
    (
        "hair care",
        "beauty",
        "Beauty & Personal Care › Hair Care › Treatments",
        "shampoo,conditioner,hair mask,hair serum,scalp oil,styling cream",
        "sulfate free,cruelty free,tea tree,argan oil,dry hair,damaged hair,paraben free",
        "scent,size",
    ),
    (
        "snacks",
        "grocery",
        "Grocery & Gourmet Food › Snack Foods › Bars",
        "granola bar,dried mango,trail mix,rice cracker,almond cookie,popcorn",
        "gluten free,non gmo,low sugar,high protein,plant based,dairy free,individually wrapped",
        "flavor,size",
    ),
    (
        "headphones",
        "electronics",
        "Electronics › Headphones › Earbud Headphones",
        "wireless earbud,gaming headset,neckband headphone,bone conduction headphone,studio headphone,sleep headband",
        "noise cancelling,fast charging,stereo sound,hands free,long lasting,water resistant",
        "color",
    ),
)
_VALUES = {
    "color": _COLORS,
    "size": _SIZES,
    "scent": ["lavender", "coconut", "eucalyptus", "vanilla bean", "rosemary mint", "unscented"],
    "flavor": ["dark chocolate", "peanut butter", "salted caramel", "wild berry", "honey mustard", "sea salt"],
}
_BRANDS = "Alderway,Brightmoor,Cavello,Dunmere,Eastpine,Fernhall,Galloway,Harrowgate,Ivenna,Juniper Lane,Kestrel,Lowfield,Marlowe,Northquay,Orrin,Pellmor"
_LINES = "Classic,Everyday,Signature,Heritage,Horizon,Studio,Summit,Harbor,Meadow,Ember,Aurora,Cobalt,Willow,Granary,Solstice,Monarch"


def make_products(count: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Products, attributes with synthetic instructions, and instructions as people write them: WebShop's three files. A function of the seed."""
    if count < 1:
        raise ValueError(f"webshop: the number of products must be at least 1, got {count}")
    products, attributes, written = [], {}, {}
    for number in range(count):
        rng = random.Random(f"product-{seed}-{number}")
        query, category, path, things, qualities, option_names = rng.choice(_FAMILIES)
        thing, asin = rng.choice(things.split(",")), f"B{number:09d}"
        chosen = rng.sample(qualities.split(","), 3)
        brand, line = rng.choice(_BRANDS.split(",")), rng.choice(_LINES.split(","))
        model = f"{rng.choice('ABCDEFGHJKLMNPRSTVWXYZ')}{number}"
        name = f"{brand} {line} {model} {chosen[0].title()} {thing.title()}"
        low = round(rng.uniform(4, 180), 2)
        options = {option: rng.sample(_VALUES[option], rng.randint(2, 4)) for option in option_names.split(",")}
        products.append(
            {
                "asin": asin,
                "name": name,
                "category": category,
                "query": query,
                "product_category": f"{path} › {thing.title()}s",
                "full_description": f"This {thing} is made for every day. It is {chosen[1]}. {rng.choice(_LINES.split(','))} edition.",
                "small_description": [f"{quality.capitalize()}: made so that your {thing} keeps it." for quality in chosen],
                "pricing": f"${low}" if rng.random() < 0.7 else f"${low} - ${round(low + rng.uniform(2, 20), 2)}",
                "average_rating": round(rng.uniform(3, 5), 1),
                "images": [""],
                "customization_options": {
                    option: [{"value": value, "image": None} for value in values] for option, values in options.items()
                },
            }
        )
        wanted = rng.sample(chosen, rng.randint(1, 2))
        attributes[asin] = {
            "attributes": chosen,
            "instruction": f"Find me {', '.join(wanted)} {thing}",
            "instruction_attributes": wanted,
        }
        picked = {option: rng.choice(values) for option, values in options.items()}
        of = " and ".join(f"the {option} {value}" for option, value in picked.items())
        written[asin] = [
            {
                "instruction": f"i am looking for a {thing} that is {' and '.join(wanted)}, in {of}.",
                "instruction_attributes": wanted,
                "instruction_options": list(picked.values()),
            }
        ]
    return products, attributes, written


def write_products(folder: Path, count: int, seed: int) -> None:
    from sapo_fast.envs.webshop_data import FILES, HUMAN

    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip((*FILES["small"], HUMAN), make_products(count, seed), strict=True):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sapo_fast.envs.webshop_generator", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--products", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        write_products(given.folder, given.products, given.seed)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.products} products in {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
