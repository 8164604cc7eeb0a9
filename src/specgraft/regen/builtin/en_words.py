"""Words shared by the English families."""

from __future__ import annotations

SCIENCE = """photosynthesis|gravity|the water cycle|plate tectonics|black holes|evolution by natural selection
DNA|the immune system|vaccines|the greenhouse effect|volcanoes|tides|rainbows|magnetism
nuclear fusion|the periodic table|antibiotic resistance|ocean currents|the Doppler effect|entropy
acids and bases|lightning|hibernation|bird migration|how bees make honey|fermentation
radiocarbon dating|the life cycle of a star|static electricity|the nitrogen cycle|coral bleaching
muscle memory|the placebo effect|circadian rhythms|sound waves|atoms and molecules|erosion|eclipses
how soap cleans|metamorphosis|osmosis|the human heartbeat|why leaves change colour|earthquakes
supernovas|enzymes"""
SOCIETY = """inflation|compound interest|supply and demand|the stock market|opportunity cost|a mortgage
credit scores|democracy|the separation of powers|trade deficits|the Industrial Revolution
the Silk Road|the Renaissance|the Cold War|the printing press|insurance|a budget deficit
unemployment rates|copyright|patents|habeas corpus|a constitution|gerrymandering|the gold standard
bonds and shares|venture capital|the tragedy of the commons|game theory|confirmation bias|sunk costs
stoicism|utilitarianism|existentialism|cognitive dissonance|urbanisation|the Roman Republic
feudalism|the French Revolution|the Enlightenment|microfinance|minimum wages|franchising"""
TECH = """machine learning|neural networks|encryption|the internet|Wi-Fi|GPS|solar panels|electric motors
batteries|3D printing|cloud computing|blockchain|barcodes|touchscreens|noise-cancelling headphones
satellites|jet engines|refrigerators|heat pumps|microwave ovens|fibre optics|search engines
two-factor authentication|cookies on websites|speech recognition|recommendation systems
wind turbines|hydraulic brakes|induction cooktops|QR codes|MRI scanners|digital cameras
lithium-ion cells|autopilots|Bluetooth|data compression|virtual reality|self-driving cars
operating systems"""


def words(text: str) -> list[str]:
    """Split a table written with|and newlines into its entries."""
    return [word.strip() for line in text.split("\n") for word in line.split("|") if word.strip()]


TOPICS = words(SCIENCE) + words(SOCIETY) + words(TECH)
AUDIENCES = words(
    "a curious ten-year-old|a high school student|my grandmother|a complete beginner|a busy manager|"
    "a first-year student"
    "|someone who dislikes jargon|an artist|a room of teenagers|a new colleague"
)
NAMES = words(
    "Ana|Ben|Chidi|Dana|Elif|Farah|George|Hana|Ivan|Julia|Kofi|Lena|Marco|Nadia|Omar|Priya|Quinn|"
    "Rosa|Sam|Tara"
    "|Uma|Victor|Wei|Yara|Zoe|Noah|Mia|Leo|Grace|Theo"
)
CITIES = words(
    "Lisbon|Nairobi|Toronto|Osaka|Buenos Aires|Oslo|Chicago|Marrakesh|Hanoi|Berlin|Dublin|Lima|Cairo|"
    "Seoul|Prague|Athens"
    "|Melbourne|Istanbul|Vancouver|Mumbai|Edinburgh|Reykjavik|Naples|Bogota|Tallinn|Cape Town|Vienna|"
    "Kyoto|Seattle|Porto"
)
SYSTEM = words(
    "You are a helpful assistant.|You are a friendly assistant who answers briefly and clearly."
    "|Answer in plain English, without jargon.|You are a patient tutor. Explain step by step."
    "|You are a careful assistant. If you are not sure, say so.|Keep every answer under 100 words."
    "|You are a cheerful assistant that uses simple words.|Answer as precisely as you can, and use "
    "bullet points where useful."
)
