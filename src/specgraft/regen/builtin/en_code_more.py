"""English code families: databases, shells, the web and tools."""

from __future__ import annotations

from .en_words import words
from .family import Family, fill_in

_TABLES = [
    {
        "name": "orders",
        "columns": "id, customer_id, total, created_at",
        "one": "order",
        "group": "customer",
        "number": "total",
    },
    {
        "name": "employees",
        "columns": "id, name, department, salary, hired_on",
        "one": "employee",
        "group": "department",
        "number": "salary",
    },
    {"name": "books", "columns": "id, title, author, pages, year", "one": "book", "group": "author", "number": "pages"},
    {
        "name": "flights",
        "columns": "id, airline, origin, destination, delay_minutes",
        "one": "flight",
        "group": "airline",
        "number": "delay_minutes",
    },
    {
        "name": "visits",
        "columns": "id, page, user_id, seconds, visited_at",
        "one": "visit",
        "group": "page",
        "number": "seconds",
    },
    {
        "name": "students",
        "columns": "id, name, class, grade, birthday",
        "one": "student",
        "group": "class",
        "number": "grade",
    },
    {
        "name": "songs",
        "columns": "id, title, artist, plays, released",
        "one": "song",
        "group": "artist",
        "number": "plays",
    },
    {"name": "rooms", "columns": "id, hotel, beds, price, floor", "one": "room", "group": "hotel", "number": "price"},
    {
        "name": "matches",
        "columns": "id, home_team, away_team, goals, played_on",
        "one": "match",
        "group": "home_team",
        "number": "goals",
    },
    {
        "name": "products",
        "columns": "id, name, category, price, stock",
        "one": "product",
        "group": "category",
        "number": "price",
    },
    {
        "name": "sensors",
        "columns": "id, site, kind, value, measured_at",
        "one": "reading",
        "group": "site",
        "number": "value",
    },
    {
        "name": "tickets",
        "columns": "id, assignee, priority, hours, closed_at",
        "one": "ticket",
        "group": "assignee",
        "number": "hours",
    },
]
_FILES = words(
    "log files|photos|CSV files|Markdown files|backups|PDF files|Python files|screenshots|temporary "
    "files|videos|config files|text files"
)
_SHELL = words(
    "find all {files} older than a week|count the lines in all {files}|copy all {files} to another "
    "disk|rename all {files} to lower case"
    "|delete all {files} after asking me|list the ten largest {files}|pack all {files} into one "
    "archive|print the names of {files} that contain 'TODO'"
    "|move {files} into folders by year|compare the {files} in two folders|replace 'http' with "
    "'https' in all {files}|sort {files} by size"
)
_GIT = words(
    "undo my last commit but keep the changes|rename a branch|see who changed a line|merge main into "
    "my branch|resolve a merge conflict"
    "|delete a remote branch|stash my changes|find the commit that introduced a bug|squash three "
    "commits into one|ignore a folder"
    "|tag a release|move a commit to another branch|discard all local changes|compare two branches|"
    "clone only the latest commit"
    "|change the author of the last commit|recover a deleted branch|show the history of one file|"
    "split a commit in two|push to a new remote"
)
_PATTERNS = words(
    "an email address|a date like 2024-05-17|a time like 23:59|a hexadecimal colour|a phone number "
    "with a country code|an IPv4 address"
    "|a price in euros|a word that starts with a capital letter|a hashtag|a URL|a postal code with "
    "five digits|a line without any digits"
    "|a number with optional decimals|a quoted string|a file name that ends in .jpg or .png|a "
    "duplicated word|a licence plate like AB-123-CD"
    "|an HTML tag|a version number like 1.4.2|a user name of 3 to 12 letters"
)
_WIDGETS = words(
    "a navigation bar|a login form|a photo gallery|a pricing table|a contact form|a dark mode button|"
    "a card with a picture|a progress bar"
    "|a footer with three columns|a search box|a drop-down menu|a modal window|a sticky header|a "
    "blog post page|a countdown to New Year"
    "|a star rating|a table with striped rows|a sidebar that can be hidden|a to-do list|a quote of "
    "the day box|a tooltip|a carousel"
)
_LIBS = words(
    "pandas|NumPy|Flask|FastAPI|pytest|Matplotlib|SQLAlchemy|requests|Django|scikit-learn|React|"
    "Express|Vue|Node.js|Docker|Kubernetes|Redis"
    "|PostgreSQL|MongoDB|Nginx|Bootstrap|jQuery|Spring|Qt|SQLite|GraphQL|Terraform|Pydantic"
)
_JOBS = words(
    "read a CSV file and print the average of one column|download a web page and count its links|"
    "resize all pictures in a folder"
    "|merge several Excel files|send an email with an attachment|watch a folder for new files|plot "
    "the temperature of a week"
    "|convert JSON to CSV|scrape headlines from a news page|back up a folder every night|find "
    "duplicate files|generate a PDF invoice"
    "|parse a log file and count errors per hour|fill a template with names from a list|check "
    "whether ten websites are online"
    "|rename photos by the date they were taken|translate a subtitle file|split a big text file into "
    "parts|calculate a checksum for each file"
    "|read sensor values from a serial port|create a word cloud|compare two spreadsheets|clean a "
    "list of addresses|draw a bar chart of sales"
)
_CHOICES = words(
    "a list and a tuple|an array and a linked list|SQL and NoSQL databases|let and var|a process and "
    "a thread|a compiler and an interpreter"
    "|GET and POST|a class and an object|a stack and a queue|unit tests and integration tests|Git "
    "and GitHub|TCP and UDP|a shallow and a deep copy"
    "|an abstract class and an interface|merge and rebase|a virtual machine and a container|"
    "authentication and authorisation|== and is in Python"
    "|== and === in JavaScript|a set and a dictionary|a left join and an inner join|static and "
    "dynamic typing|a library and a framework"
    "|a monolith and microservices|a float and a decimal|a for loop and a while loop|null and "
    "undefined|a primary key and a foreign key"
    "|synchronous and asynchronous code|a bug and a vulnerability|an iterator and an iterable|a hash "
    "and an encrypted value"
)
_ALGORITHMS = words(
    "bubble sort|merge sort|quicksort|insertion sort|binary search|depth-first search|breadth-first "
    "search|Dijkstra's algorithm|the sieve of Eratosthenes"
    "|Euclid's algorithm|heap sort|the Tower of Hanoi|the knapsack problem|Huffman coding|"
    "topological sort|flood fill|Floyd's cycle detection"
    "|the eight queens puzzle|binary exponentiation|Levenshtein distance|reservoir sampling|counting "
    "sort|the two-pointer technique|union-find"
    "|Conway's Game of Life|a trie|a Bloom filter|run-length encoding|the Luhn check|matrix "
    "multiplication"
)
_DATA = words(
    "a person with name, age and email|a book with title, author and tags|a weather report for three "
    "days|a recipe with ingredients|a user profile with settings"
    "|an invoice with two items|a football match with scores|a playlist with songs|a shopping list|a "
    "course timetable|a list of countries and capitals"
    "|a family tree with two generations|a bus timetable|a product with sizes and colours|a survey "
    "with five answers|a hotel booking"
)
_HABITS = words(
    "naming variables|writing commit messages|commenting code|handling errors|structuring a small "
    "project|logging|reviewing a colleague's code"
    "|reading unfamiliar code|writing a README|debugging without a debugger|choosing a first "
    "programming language|preparing for a coding interview"
    "|storing passwords|handling time zones|working with legacy code|estimating how long a task "
    "takes|making a website accessible|writing fast SQL"
    "|designing a REST API|testing code that talks to the network|organising CSS|avoiding duplicated "
    "code|picking an open-source licence|backing up a database"
)


FAMILIES = (
    Family(
        "sql-query",
        (
            ("I have a table {t.name} ({t.columns}). Write a query that returns the number of rows per {t.group}."),
            ("Table {t.name} has the columns {t.columns}. Write SQL to get the {n} rows with the highest {t.number}."),
            ("Write an SQL query on {t.name} ({t.columns}) for every {t.group} whose average {t.number} is above {k}."),
            (
                "How do I delete all rows of {t.name} with {t.number} below {k}? Show the query and how to check "
                "it first."
            ),
            "Given {t.name} ({t.columns}), find the {t.one} with the lowest {t.number} for each {t.group}.",
            ("Write a CREATE TABLE statement for {t.name} with these columns: {t.columns}. Choose sensible types."),
            "Write INSERT statements for {n} made-up rows of {t.name} ({t.columns}).",
        ),
        {"t": _TABLES, "n": ["three", "five", "ten"], "k": [5, 20, 50, 100, 250]},
        ["You are an SQL expert. Answer with one query.", "You write SQL for PostgreSQL."],
        0.25,
    ),
    Family(
        "shell-command",
        (
            "Which bash command can I use to {shell}?",
            "Write a bash script to {shell}.",
            "How can I {shell} in a Linux terminal? Explain the options you use.",
            "I need to {shell} on macOS. What do I type?",
        ),
        {"files": _FILES, "shell": _SHELL},
        ["You are a Linux expert. Give the command first."],
        0.2,
        limit=200,
        derive=fill_in("shell"),
    ),
    Family(
        "git",
        (
            "How do I {task} with git?",
            "What is the git command to {task}? Is it safe?",
            "I want to {task}, but I am afraid to lose work. Guide me.",
            "Explain step by step how to {task} in git.",
            "A colleague asks me how to {task}. Write a short answer for our wiki.",
            "I tried to {task} and now git status looks strange. What should I check?",
        ),
        {"task": _GIT},
    ),
    Family(
        "regex",
        (
            "Write a regular expression that matches {p}.",
            "Write a regex for {p} and explain each part.",
            "How do I find {p} in a text with {lang}?",
            "Give me three strings that match and three that do not match a regex for {p}.",
            "Write a {lang} function that checks whether a string is {p}.",
        ),
        {"p": _PATTERNS, "lang": ["Python", "JavaScript", "Java", "grep"]},
        limit=180,
    ),
    Family(
        "web-page",
        (
            "Write HTML and CSS for {w}.",
            "How do I build {w} with plain JavaScript?",
            "Create {w} that also works on a phone.",
            "Write the CSS for {w} in {style} style.",
            "Make {w} accessible: which attributes and tags do I need?",
        ),
        {"w": _WIDGETS, "style": ["a minimal", "a retro", "a colourful", "a newspaper", "an elegant"]},
        limit=160,
    ),
    Family(
        "library",
        (
            "What is {lib} used for?",
            "Show me a minimal example with {lib}.",
            "What are the alternatives to {lib}, and when would I pick them?",
            "How do I install {lib} and check that it works?",
            "Name three things beginners get wrong with {lib}.",
            "Write a cheat sheet for {lib} with the {n} most useful commands or calls.",
        ),
        {"lib": _LIBS, "n": ["five", "eight", "ten"]},
    ),
    Family(
        "script",
        (
            "Write a Python script to {job}.",
            "How can I {job} in Python?",
            "Write a Node.js script to {job}.",
            "I want to {job} automatically. Which tools do I need, and what are the steps?",
            "Write a script to {job}. It should have command-line options and a help text.",
            "What can go wrong when I {job} with a script? List the cases to handle.",
        ),
        {"job": _JOBS},
        ["You are a helpful coding assistant.", "Write clean code with short comments."],
        0.2,
    ),
    Family(
        "differences",
        (
            "What is the difference between {pair}?",
            "Explain {pair} to a beginner, with an example of each.",
            "When should I think about the choice between {pair}?",
            "Compare {pair} in a table with three rows.",
            "An interviewer asks about {pair}. What is a good short answer?",
        ),
        {"pair": _CHOICES},
    ),
    Family(
        "algorithm",
        (
            "Explain {a} step by step.",
            "Implement {a} in {lang}.",
            "Show how {a} works on a small example.",
            "What is the time complexity of {a}, and why?",
            "Write pseudocode for {a}.",
            "Where is {a} used in practice?",
        ),
        {"a": _ALGORITHMS, "lang": ["Python", "JavaScript", "C", "Java", "Go", "Rust"]},
        limit=240,
    ),
    Family(
        "data-format",
        (
            "Write {d} as {fmt}.",
            "Show me {d} in {fmt} and then the same data in {other}.",
            "Write Python code that loads {d} from {fmt} and prints it nicely.",
            "Design a {fmt} file for {d} and explain the fields.",
        ),
        {
            "d": _DATA,
            "fmt": ["JSON", "YAML", "XML", "TOML", "CSV"],
            "other": ["a Markdown table", "an HTML table", "an SQL table", "a Python dictionary"],
        },
        ["Answer only with the requested data.", "You are a helpful coding assistant."],
        0.2,
        limit=180,
    ),
    Family(
        "practice",
        (
            "What are good rules for {habit}?",
            "Give me a checklist for {habit}.",
            "What do experienced developers do differently when it comes to {habit}?",
            "I always struggle with {habit}. What would you advise?",
            "Give a good and a bad example of {habit}.",
        ),
        {"habit": _HABITS},
    ),
    Family(
        "complete-code",
        (
            'Complete this function:\n\n```python\ndef {f.0}:\n    """{f.1}"""\n```',
            "Fill in the body.\n```python\ndef {f.0}:\n    # {f.1}\n    ...\n```",
            ('Write doctests for this function before you implement it:\n```python\ndef {f.0}:\n    """{f.1}"""\n```'),
            'def {f.0}:\n    """{f.1}"""\n',
        ),
        {
            "f": [
                ("clamp(value, low, high)", "Return value limited to the range from low to high."),
                ("initials(name)", "Return the initials of a name, like 'A. B.'."),
                ("is_weekend(date)", "Return True if date is a Saturday or Sunday."),
                ("count_words(text)", "Return a dict that maps each word to its count."),
                ("nearest(points, origin)", "Return the point closest to origin."),
                ("to_minutes(clock)", "Convert 'HH:MM' to minutes after midnight."),
                ("chunk(items, size)", "Split items into lists of at most size elements."),
                ("dedupe(items)", "Remove duplicates and keep the order."),
                ("caesar(text, shift)", "Shift each letter of text by shift places."),
                ("change(amount, coins)", "Return the fewest coins that make up amount."),
                ("merge(a, b)", "Merge two sorted lists into one sorted list."),
                ("depth(tree)", "Return the depth of a nested list."),
                ("format_size(n)", "Format a number of bytes as '1.5 MB'."),
                ("parse_query(url)", "Return the query parameters of a URL as a dict."),
                ("transpose(rows)", "Turn rows into columns."),
                ("moving_average(values, window)", "Return the moving averages of values."),
                ("longest_prefix(words)", "Return the longest prefix that all words share."),
                ("rot90(grid)", "Rotate a square grid clockwise by 90 degrees."),
                ("safe_div(a, b, default=None)", "Divide a by b, or return default if b is zero."),
                ("bmi(kg, metres)", "Return the body mass index, rounded to one digit."),
                ("overlap(a, b)", "Return True if two (start, end) intervals overlap."),
                ("title_case(text)", "Capitalise each word except short ones like 'of'."),
                ("flatten(mapping, prefix='')", "Flatten a nested dict to keys joined with dots."),
                ("roman(n)", "Return n (1 to 3999) as a Roman numeral."),
                ("vowels(text)", "Return the vowels of text in order."),
                ("next_monday(date)", "Return the first Monday after date."),
                ("histogram(values)", "Print one row of stars per value."),
                ("mode(values)", "Return the most frequent value; the smallest one wins ties."),
                ("is_valid_isbn(code)", "Check the last digit of a 13-digit ISBN."),
                ("mask(email)", "Hide the local part of an email except its first letter."),
            ]
        },
        ["Reply with code only.", "You are a helpful coding assistant."],
        0.2,
    ),
    Family(
        "code-chat",
        (
            ("How do I {job} in Python?", "Do you already have Python installed, and which version?", "{reply}"),
            (
                "Can you help me with {lib}?",
                "Sure! What are you trying to do?",
                "I want to {job}, if {lib} is the right tool for that.",
            ),
            ("I'm learning about {a}.", "Nice. Would you like an explanation or an exercise?", "{want}"),
        ),
        {
            "job": _JOBS,
            "lib": _LIBS,
            "a": _ALGORITHMS,
            "reply": [
                "Yes, Python 3.11 on Windows.",
                "I don't think so. I have a Mac.",
                "Yes, but I can't install any packages.",
                "Version 3.9, and I prefer short scripts.",
            ],
            "want": [
                "An exercise, please.",
                "An explanation, with a picture in text.",
                "First an explanation, then an exercise.",
                "Just show me code.",
            ],
        },
        limit=200,
    ),
)
