"""Names, orders and sizes of the published data sets, as their authors or the usual protocols fixed them."""

from dataclasses import dataclass, field

__all__ = [
    "CIFAR10_CLASSES", "CIFAR100_CLASSES", "CORRUPTIONS", "DOMAINNET126_CLASSES", "DOMAINNET126_COUNTS",
    "DOMAIN_FOLDERS", "EXTRA_CORRUPTIONS", "DomainFolders",
]  # fmt: skip


@dataclass(frozen=True)
class DomainFolders:
    """A benchmark laid out as `<folder>/<domain>/<class>/<image>`.

    `counts` maps each domain, in index order, to its published number of images; `aliases` are other names under which
    a domain's folder is met; `note` explains a difference in numbers that is known.
    """

    name: str
    folders: tuple[str, ...]
    counts: dict[str, int]
    classes: tuple[str, ...]
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The order of the domains is that of their names sorted as text, by which papers number them (location_100 first).
DOMAIN_FOLDERS = {
    "pacs": DomainFolders(
        name="PACS",
        folders=("PACS",),
        counts={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
        classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        aliases={"art_painting": ("art",)},
    ),
    "vlcs": DomainFolders(
        name="VLCS",
        folders=("VLCS",),
        counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
        classes=("bird", "car", "chair", "dog", "person"),
        aliases={"Caltech101": ("caltech",), "SUN09": ("sun",), "VOC2007": ("voc", "pascal")},
    ),
    "officehome": DomainFolders(
        name="OfficeHome",
        folders=("office_home", "OfficeHome", "OfficeHomeDataset_10072016"),
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
        classes=_words(
            """Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards
            Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork
            Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven
            Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver
            Shelf Sink Sneakers Soda Speaker Spoon TV Table Telephone ToothBrush Toys Trash_Can Webcam"""
        ),
    ),
    "terraincognita": DomainFolders(
        name="TerraIncognita",
        folders=("terra_incognita", "TerraIncognita"),
        counts={"location_100": 4879, "location_38": 9767, "location_43": 4020, "location_46": 6122},
        classes=_words("bird bobcat cat coyote dog empty opossum rabbit raccoon squirrel"),
        note="Papers report 24,788 images; the download offered since then holds 24,330.",
    ),
}

DOMAINNET126_COUNTS = {"clipart": 18_523, "painting": 30_042, "real": 69_622, "sketch": 24_147}
DOMAINNET126_CLASSES = 126

# The order in which papers list the corruptions, for all three -C sets.
CORRUPTIONS = _words(
    """gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog brightness
    contrast elastic_transform pixelate jpeg_compression"""
)
# Published beside the fifteen, for choosing settings; opened only when named.
EXTRA_CORRUPTIONS = _words("speckle_noise gaussian_blur spatter saturate")

CIFAR10_CLASSES = _words("airplane automobile bird cat deer dog frog horse ship truck")
CIFAR100_CLASSES = _words(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm"""
)
