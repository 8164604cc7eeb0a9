"""English code families: data work, messages of tools, configuration and APIs."""

from __future__ import annotations

from .en_words import words
from .family import Family

_FRAMES = words(
    "sales per shop|patients and visits|films and ratings|daily rainfall|bike rentals|exam results|"
    "energy use per household|flight delays|song plays|house prices|support tickets|athletes and "
    "times"
)
_STEPS = words(
    "drop rows with missing values|group by month and sum|join it with a second table|find outliers|"
    "plot a histogram|pivot it from long to wide|rename the columns|convert a text column to dates"
    "|keep the ten largest values|compute a rolling average|remove duplicate rows|split it into "
    "training and test sets|fill gaps with the median|save it as a compressed file"
)
_MESSAGES = words(
    "ModuleNotFoundError: No module named 'requests'|fatal: not a git repository|Permission denied "
    "(publickey)|CORS policy: No 'Access-Control-Allow-Origin' header|npm ERR! code ERESOLVE|"
    "Segmentation fault (core dumped)"
    "|java.lang.NullPointerException|UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff|bash: "
    "./run.sh: Permission denied|Address already in use|IndentationError: unexpected indent|404 Not "
    "Found|502 Bad Gateway"
    "|CONFLICT (content): Merge conflict in app.py|ORA-00942: table or view does not exist|Too many "
    "open files|ZeroDivisionError: division by zero|SSL certificate problem: unable to get local "
    "issuer certificate"
    "|Uncaught ReferenceError: $ is not defined|docker: no space left on device|error: linker `cc` "
    "not found|MemoryError|Deadlock found when trying to get lock|OutOfMemoryError: Java heap space|"
    "command not found: python"
)
_CONFIGS = words(
    "a Dockerfile for a small Flask app|a Makefile with build, test and clean|a GitHub Actions "
    "workflow that runs pytest|an .editorconfig for a mixed Python and JavaScript project|a "
    ".gitignore for a Java project"
    "|an Nginx site that serves static files|a crontab entry for a nightly backup|a systemd service "
    "for a Node.js server|a docker-compose file with a web app and a database|a package.json for a "
    "library|a pyproject.toml for a command-line tool"
    "|an SSH config with two hosts|a logging configuration with a file and a console|a robots.txt "
    "that hides one folder|a tmux configuration for beginners|a VS Code settings file for Python"
)
_APIS = words(
    "a library that lends books|a cinema that sells tickets|a bike-sharing service|a recipe "
    "collection|a clinic with appointments|a to-do list shared by a team|a pet shelter|a bakery with "
    "pre-orders|a language school|a parcel service|a quiz game|a hotel with rooms and bookings"
)

FAMILIES = (
    Family(
        "data-frame",
        (
            "I have a pandas data frame with {f}. How do I {s}?",
            "Show me how to {s} in pandas. The data is about {f}.",
            "Load a CSV file of {f} and {s}.",
            "In R, how would I {s} for a table of {f}?",
            "Which chart fits {f}, and how do I draw it in Python?",
        ),
        {"f": _FRAMES, "s": _STEPS},
        limit=130,
    ),
    Family(
        "error-message",
        (
            "What does this message mean: {m}",
            'I get "{m}". How do I fix it?',
            "{m}\n\nIt worked yesterday. What could have changed?",
            "Name the three most likely causes of: {m}",
            'How would you search for the cause of "{m}"? List the steps.',
        ),
        {"m": _MESSAGES},
        ["You are a helpful coding assistant.", "Answer in at most five steps."],
        0.2,
        limit=125,
    ),
    Family(
        "config-file",
        (
            "Write {c}.",
            "Write {c} and comment every line.",
            "What belongs in {c}?",
            "What are common mistakes in {c}?",
            "Show the smallest useful version of {c}.",
        ),
        {"c": _CONFIGS},
        limit=80,
    ),
    Family(
        "api-design",
        (
            "Design a REST API for {a}. List the endpoints.",
            "Write the database tables for {a}.",
            "Which classes would you use for {a}?",
            "Write a Python sketch of the data model for {a}.",
            "What could go wrong in the software of {a}, and how would you test it?",
            "Write three user stories for the software of {a}.",
            "Write an OpenAPI description of one endpoint for {a}.",
        ),
        {"a": _APIS},
        limit=84,
    ),
)
