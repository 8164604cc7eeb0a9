"""Code snippets shared by the code families of every language."""

from __future__ import annotations

# (programming language, code that works)
SNIPPETS = [
    ("python", "def f(xs):\n    return [x for i, x in enumerate(xs) if x not in xs[:i]]"),
    ("python", "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a"),
    (
        "python",
        (
            "from collections import Counter\n\ndef top(text, k):\n    return "
            "Counter(text.lower().split()).most_common(k)"
        ),
    ),
    (
        "python",
        (
            "def chunks(items, size):\n    for start in range(0, len(items), size):\n        yield "
            "items[start:start + size]"
        ),
    ),
    ("python", "squares = {n: n * n for n in range(10) if n % 2 == 0}\nprint(squares)"),
    ("python", "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"),
    (
        "python",
        (
            "with open('notes.txt') as file:\n    lines = [line.strip() for line in file if "
            "line.strip()]\nprint(len(lines))"
        ),
    ),
    (
        "python",
        (
            "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n  "
            "      self._items.append(item)\n\n    def pop(self):\n        return self._items.pop()"
        ),
    ),
    (
        "python",
        (
            "def is_balanced(text):\n    depth = 0\n    for char in text:\n        depth += (char == '(') - "
            "(char == ')')\n        if depth < 0:\n            return False\n    return depth == 0"
        ),
    ),
    (
        "python",
        (
            "def search(items, target):\n    low, high = 0, len(items)\n    while low < high:\n        mid = "
            "(low + high) // 2\n        if items[mid] < target:\n            low = mid + 1\n        else:\n  "
            "          high = mid\n    return low"
        ),
    ),
    (
        "python",
        (
            "import functools\n\n@functools.lru_cache\ndef steps(n):\n    return 1 if n < 2 else steps(n - "
            "1) + steps(n - 2)"
        ),
    ),
    ("python", "matrix = [[1, 2, 3], [4, 5, 6]]\nprint([list(row) for row in zip(*matrix)])"),
    ("javascript", "const unique = (items) => [...new Set(items)];"),
    (
        "javascript",
        (
            "function debounce(fn, ms) {\n  let timer;\n  return (...args) => {\n    clearTimeout(timer);\n  "
            "  timer = setTimeout(() => fn(...args), ms);\n  };\n}"
        ),
    ),
    (
        "javascript",
        (
            "const total = cart\n  .filter((item) => item.inStock)\n  .reduce((sum, item) => sum + "
            "item.price * item.count, 0);"
        ),
    ),
    (
        "javascript",
        (
            "async function load(url) {\n  const response = await fetch(url);\n  if (!response.ok) throw new "
            "Error(response.status);\n  return response.json();\n}"
        ),
    ),
    (
        "javascript",
        (
            "const counter = () => {\n  let n = 0;\n  return () => ++n;\n};\nconst next = "
            "counter();\nconsole.log(next(), next());"
        ),
    ),
    (
        "javascript",
        (
            "const groups = {};\nfor (const word of words) {\n  const key = word[0];\n  (groups[key] ??= "
            "[]).push(word);\n}"
        ),
    ),
    (
        "sql",
        (
            "SELECT customer_id, COUNT(*) AS orders\nFROM orders\nGROUP BY customer_id\nHAVING COUNT(*) > "
            "3\nORDER BY orders DESC;"
        ),
    ),
    (
        "sql",
        (
            "SELECT e.name, d.name AS department\nFROM employees AS e\nLEFT JOIN departments AS d ON d.id = "
            "e.department_id\nWHERE d.id IS NULL;"
        ),
    ),
    ("sql", "UPDATE products\nSET price = price * 0.9\nWHERE category = 'garden' AND stock > 100;"),
    (
        "sql",
        ("SELECT name, salary,\n       RANK() OVER (PARTITION BY team ORDER BY salary DESC) AS place\nFROM staff;"),
    ),
    ("bash", 'for file in *.txt; do\n  mv "$file" "${file%.txt}.md"\ndone'),
    ("bash", "grep -rhoE '[0-9]{3}-[0-9]{4}' logs/ | sort | uniq -c | sort -nr | head"),
    ("bash", "find . -name '*.log' -mtime +7 -print0 | xargs -0 gzip"),
    ("bash", 'if [ $# -lt 1 ]; then\n  echo "usage: $0 FILE" >&2\n  exit 1\nfi'),
    (
        "java",
        (
            "int sum = 0;\nfor (int value : values) {\n    if (value % 2 == 0) sum += "
            "value;\n}\nSystem.out.println(sum);"
        ),
    ),
    ("c", "int length(const char *s) {\n    const char *p = s;\n    while (*p) p++;\n    return p - s;\n}"),
    (
        "go",
        (
            "func reverse(s []int) {\n\tfor i, j := 0, len(s)-1; i < j; i, j = i+1, j-1 {\n\t\ts[i], s[j] = "
            "s[j], s[i]\n\t}\n}"
        ),
    ),
    ("rust", ("fn longest(words: &[String]) -> Option<&String> {\n    words.iter().max_by_key(|word| word.len())\n}")),
    (
        "html",
        (
            '<form action="/search" method="get">\n  <label for="q">Search</label>\n  <input id="q" '
            'name="q" required>\n  <button>Go</button>\n</form>'
        ),
    ),
    (
        "css",
        (".cards {\n  display: grid;\n  grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr));\n  gap: 1rem;\n}"),
    ),
]

# (programming language, code with a bug, error message or symptom in English)
BUGS = [
    (
        "python",
        ("def mean(values):\n    total = 0\n    for v in values:\n        total += v\n    return total / len(value)"),
        "NameError: name 'value' is not defined",
    ),
    ("python", "numbers = [1, 2, 3]\nfor i in range(4):\n    print(numbers[i])", "IndexError: list index out of range"),
    (
        "python",
        "age = input('Age: ')\nif age > 18:\n    print('adult')",
        "TypeError: '>' not supported between instances of 'str' and 'int'",
    ),
    (
        "python",
        ("def add(item, items=[]):\n    items.append(item)\n    return items\n\nprint(add(1))\nprint(add(2))"),
        "[1]\n[1, 2]",
    ),
    ("python", "config = {'host': 'localhost'}\nprint(config['port'])", "KeyError: 'port'"),
    ("python", "def greet(name)\n    print('Hello ' + name)", "SyntaxError: expected ':'"),
    ("python", "total = 'Total: ' + 42\nprint(total)", 'TypeError: can only concatenate str (not "int") to str'),
    (
        "python",
        ("items = [1, 2, 2, 3]\nfor item in items:\n    if item == 2:\n        items.remove(item)\nprint(items)"),
        "[1, 2, 3]",
    ),
    (
        "python",
        "class Dog:\n    def bark():\n        print('Woof')\n\nDog().bark()",
        "TypeError: Dog.bark() takes 0 positional arguments but 1 was given",
    ),
    (
        "python",
        "def factorial(n):\n    return n * factorial(n - 1)\n\nprint(factorial(5))",
        "RecursionError: maximum recursion depth exceeded",
    ),
    (
        "python",
        "import json\ndata = json.loads(\"{'a': 1}\")",
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes",
    ),
    (
        "python",
        "names = ['b', 'a', 'c']\nnames = names.sort()\nprint(names[0])",
        "TypeError: 'NoneType' object is not subscriptable",
    ),
    ("python", "x = 10\ndef bump():\n    x += 1\nbump()", "UnboundLocalError: cannot access local variable 'x'"),
    (
        "javascript",
        "const user = null;\nconsole.log(user.name);",
        "TypeError: Cannot read properties of null (reading 'name')",
    ),
    ("javascript", "const add = (a, b) => { a + b };\nconsole.log(add(2, 3));", "undefined"),
    ("javascript", "for (var i = 0; i < 3; i++) {\n  setTimeout(() => console.log(i), 10);\n}", "3 3 3"),
    ("javascript", "const data = fetch('/api/items').json();", "TypeError: fetch(...).json is not a function"),
    ("javascript", "const sorted = [10, 9, 1].sort();\nconsole.log(sorted);", "[ 1, 10, 9 ]"),
    ("javascript", "const limit = 5;\nlimit = limit + 1;", "TypeError: Assignment to constant variable."),
    ("javascript", "if (count = 0) {\n  console.log('empty');\n}", "ReferenceError: count is not defined"),
    (
        "sql",
        "SELECT department, name, AVG(salary)\nFROM employees\nGROUP BY department;",
        'column "employees.name" must appear in the GROUP BY clause',
    ),
    ("sql", "SELECT name FROM customers WHERE email = NULL;", "(0 rows)"),
    ("sql", "SELECT id, FROM orders WHERE total > 100;", 'syntax error at or near "FROM"'),
    ("sql", "SELECT COUNT(*) AS n FROM visits WHERE n > 10 GROUP BY page;", 'column "n" does not exist'),
    ("bash", 'name = "report"\necho $name', "name: command not found"),
    ("bash", "file=my notes.txt\ncat $file", "notes.txt: command not found"),
    ("bash", 'if [ "$1" == "start"]; then\n  echo starting\nfi', "[: missing `]'"),
    ("java", 'String a = new String("hi");\nString b = new String("hi");\nSystem.out.println(a == b);', "false"),
    (
        "c",
        ("int main(void) {\n    int numbers[3];\n    for (int i = 0; i <= 3; i++) numbers[i] = i;\n    return 0;\n}"),
        "*** stack smashing detected ***",
    ),
    ("go", 'var scores map[string]int\nscores["Ana"] = 3', "panic: assignment to entry in nil map"),
    (
        "rust",
        'let name = String::from("Ana");\nlet other = name;\nprintln!("{}", name);',
        "error[E0382]: borrow of moved value: `name`",
    ),
    ("css", ".box {\n  width: 100%;\n  padding: 20px;\n}", "the box is wider than its parent"),
]

LANGUAGE_NAMES = {
    "python": "Python",
    "javascript": "JavaScript",
    "sql": "SQL",
    "bash": "Bash",
    "java": "Java",
    "c": "C",
    "go": "Go",
    "rust": "Rust",
    "html": "HTML",
    "css": "CSS",
}


def fenced(kind: str, code: str) -> str:
    """Return `code` as a Markdown code block."""
    return f"```{kind}\n{code}\n```"


CODE = [{"name": LANGUAGE_NAMES[kind], "kind": kind, "code": fenced(kind, code)} for kind, code in SNIPPETS]
BROKEN = [
    {"name": LANGUAGE_NAMES[kind], "kind": kind, "code": fenced(kind, code), "error": error}
    for kind, code, error in BUGS
]
