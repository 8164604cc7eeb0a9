"""OpenAI function definitions offered to the model in the tool families."""

from __future__ import annotations

from typing import Any


def _tool(
    name: str, description: str, required: dict[str, Any], optional: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Build a function definition; a parameter is (type or list of choices, description)."""
    properties: dict[str, Any] = {}
    for key, (kind, text) in {**required, **(optional or {})}.items():
        if isinstance(kind, list):
            properties[key] = {"type": "string", "enum": kind, "description": text}
        elif kind.endswith("[]"):
            properties[key] = {"type": "array", "items": {"type": kind[:-2]}, "description": text}
        else:
            properties[key] = {"type": kind, "description": text}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = _tool(
    "get_weather",
    "Get the current weather or the forecast for a city.",
    {"city": ("string", "Name of the city")},
    {
        "day": ("string", "'today', 'tomorrow' or a date as YYYY-MM-DD"),
        "unit": (["celsius", "fahrenheit"], "Temperature unit"),
    },
)
AIR = _tool("get_air_quality", "Get the air quality index of a city.", {"city": ("string", "Name of the city")})
EVENT = _tool(
    "create_event",
    "Add an event to the user's calendar.",
    {"title": ("string", "Title"), "start": ("string", "Start as written by the user or in ISO 8601")},
    {"duration_minutes": ("integer", "Length in minutes"), "guests": ("string[]", "Names of the guests")},
)
EVENTS = _tool(
    "list_events",
    "List the events of one day in the user's calendar.",
    {"day": ("string", "Day, for example 'Friday' or a date")},
)
SEARCH = _tool(
    "web_search",
    "Search the web and return the best results.",
    {"query": ("string", "Search words")},
    {"count": ("integer", "Number of results")},
)
CURRENCY = _tool(
    "convert_currency",
    "Convert an amount of money at today's rate.",
    {
        "amount": ("number", "Amount"),
        "source": ("string", "Three-letter code, e.g. EUR"),
        "target": ("string", "Three-letter code, e.g. USD"),
    },
)
STOCK = _tool(
    "get_stock_price", "Get the latest price of a share.", {"symbol": ("string", "Company name or ticker symbol")}
)
EMAIL = _tool(
    "send_email",
    "Send an email.",
    {"to": ("string", "Recipient"), "subject": ("string", "Subject line"), "body": ("string", "Text of the email")},
)
MESSAGE = _tool(
    "send_message",
    "Send a short text message to a contact.",
    {"contact": ("string", "Name of the contact"), "text": ("string", "The message")},
)
TIMER = _tool(
    "set_timer",
    "Start a countdown timer.",
    {"minutes": ("number", "Minutes")},
    {"label": ("string", "What the timer is for")},
)
REMINDER = _tool(
    "create_reminder",
    "Remind the user of something.",
    {"text": ("string", "What to remember"), "when": ("string", "When to remind")},
)
TRANSLATE = _tool(
    "translate_text",
    "Translate a text.",
    {"text": ("string", "Text to translate"), "target_language": ("string", "Language to translate into")},
)
FLIGHTS = _tool(
    "search_flights",
    "Find flights between two cities.",
    {
        "origin": ("string", "Departure city"),
        "destination": ("string", "Arrival city"),
        "date": ("string", "Day of travel"),
    },
    {"cabin": (["economy", "business"], "Cabin class")},
)
HOTELS = _tool(
    "search_hotels",
    "Find hotels in a city.",
    {"city": ("string", "City"), "nights": ("integer", "Number of nights")},
    {"guests": ("integer", "Number of guests"), "max_price": ("number", "Highest price per night")},
)
ROUTE = _tool(
    "get_route",
    "Get directions between two places.",
    {"start": ("string", "Starting point"), "end": ("string", "Destination")},
    {"mode": (["walk", "bike", "car", "transit"], "Means of transport")},
)
PLACES = _tool(
    "find_places",
    "Find places of a kind near a location.",
    {"kind": ("string", "Kind of place"), "near": ("string", "Location")},
    {"open_now": ("boolean", "Only places that are open now")},
)
MUSIC = _tool(
    "play_music",
    "Play music.",
    {"query": ("string", "Song, artist, genre or mood")},
    {"room": ("string", "Room to play in")},
)
LIGHT = _tool(
    "set_light",
    "Control a lamp.",
    {"room": ("string", "Room"), "state": (["on", "off", "dim"], "New state")},
    {"brightness": ("integer", "Percent, 0 to 100")},
)
HEATING = _tool(
    "set_temperature",
    "Set the target temperature of a room.",
    {"room": ("string", "Room"), "celsius": ("number", "Degrees Celsius")},
)
ORDER = _tool("get_order_status", "Look up the status of an order.", {"order_id": ("string", "Order number")})
REFUND = _tool(
    "request_refund",
    "Start a refund for an order.",
    {"order_id": ("string", "Order number"), "reason": ("string", "Reason")},
)
CALCULATE = _tool(
    "calculate", "Evaluate an arithmetic expression.", {"expression": ("string", "Expression such as '3 * (4 + 5)'")}
)
RECIPES = _tool(
    "find_recipe",
    "Find recipes that use given ingredients.",
    {"ingredients": ("string[]", "Ingredients")},
    {"diet": (["any", "vegetarian", "vegan"], "Diet"), "max_minutes": ("integer", "Longest cooking time")},
)
BOOKS = _tool(
    "search_books",
    "Search the library catalogue.",
    {"query": ("string", "Title, author or topic")},
    {"available_only": ("boolean", "Only books that can be borrowed now")},
)
MOVIES = _tool(
    "find_movies",
    "Find films by genre, year or actor.",
    {"genre": ("string", "Genre")},
    {"year": ("integer", "Year of release"), "actor": ("string", "Name of an actor")},
)
TIME = _tool("get_time", "Get the local time in a city.", {"city": ("string", "City")})
TABLE = _tool(
    "book_table",
    "Book a table in a restaurant.",
    {"restaurant": ("string", "Name"), "people": ("integer", "Number of people"), "time": ("string", "Day and time")},
)
SQL = _tool(
    "run_sql", "Run a read-only SQL query on the company database.", {"query": ("string", "SQL SELECT statement")}
)
READ_FILE = _tool("read_file", "Read a text file.", {"path": ("string", "Path of the file")})
LIST_FILES = _tool(
    "list_files",
    "List the files of a folder.",
    {"folder": ("string", "Path of the folder")},
    {"pattern": ("string", "Pattern such as *.csv")},
)
TODO = _tool(
    "add_todo", "Add an item to a to-do list.", {"item": ("string", "Item")}, {"list": ("string", "Name of the list")}
)
TRAIN = _tool(
    "get_departures",
    "Get the next departures from a station.",
    {"station": ("string", "Station")},
    {"line": ("string", "Line or direction")},
)
NEWS = _tool(
    "get_news",
    "Get current headlines about a topic.",
    {"topic": ("string", "Topic")},
    {"count": ("integer", "Number of headlines")},
)
WORKOUT = _tool(
    "log_workout",
    "Save a workout in the training diary.",
    {"activity": ("string", "Activity"), "minutes": ("integer", "Minutes")},
    {"distance_km": ("number", "Distance in km")},
)
DICTIONARY = _tool(
    "define_word",
    "Look up a word in a dictionary.",
    {"word": ("string", "Word")},
    {"language": ("string", "Language of the word")},
)
