"""The library files of `redis_stream_coord/lua/lib`, run by Lua 5.1, the version inside Redis."""

from __future__ import annotations

from importlib import resources
from typing import Any, TypeAlias

from lupa import lua51

LuaTable: TypeAlias = Any
"""A Lua table: index it, call its functions, read it with `dict(table.items())`."""

# Wrapped as the loader wraps it, and with no more globals than every supported server offers. Any other
# global, read or written, is an error there and here.
_LOAD = """
local name, source = ...
local env = {}
for word in ([[assert error getmetatable ipairs math next pairs pcall rawequal rawget rawset select
               setmetatable string table tonumber tostring type unpack xpcall]]):gmatch("%S+") do
  env[word] = _G[word]
end
local function refuse(_, word) error("global variable '" .. tostring(word) .. "'", 2) end
setmetatable(env, { __index = refuse, __newindex = refuse })
local chunk = assert(loadstring("return (function() " .. source .. "\\nend)()", "=" .. name .. ".lua"))
return setfenv(chunk, env)()
"""

_runtime = lua51.LuaRuntime(register_eval=False, register_builtins=False)


def load_library(name: str) -> LuaTable:
    """Run the library file `name` (without `.lua`) and return the table that it returns.

    Each call runs the file anew. Raises `FileNotFoundError`, or `lupa.lua51.LuaError` for a syntax error and,
    also later on when a function is called, for the use of a global that Redis does not have.
    """
    path = resources.files("redis_stream_coord") / "lua" / "lib" / f"{name}.lua"
    return _runtime.execute(_LOAD, name, path.read_text(encoding="utf-8"))


def to_lua(value: list[Any] | dict[Any, Any]) -> LuaTable:
    """Copy lists (as arrays from 1) and dicts, nested to any depth, into a Lua table."""
    return _runtime.table_from(value, recursive=True)
