-- What the scripts of package lua may use of Redis: no other globals, and no fields of them that
-- Redis does not have. go run ./internal/testkit/luacheck
std = {
  read_globals = {
    'KEYS', 'ARGV',
    'ipairs', 'next', 'pairs', 'pcall', 'select', 'tonumber', 'tostring', 'type', 'unpack',
    redis = { fields = { 'acl_check_cmd', 'call', 'pcall', 'sha1hex' } },
    cjson = { fields = { 'decode', 'encode' } },
    math = { fields = { 'abs', 'ceil', 'exp', 'floor', 'huge', 'log', 'max', 'min' } },
    string = { fields = { 'byte', 'char', 'find', 'format', 'gmatch', 'gsub', 'len', 'lower', 'match', 'rep', 'sub' } },
    table = { fields = { 'concat', 'insert', 'remove', 'sort' } },
  },
}
max_line_length = false
ignore = { '542' } -- an empty branch with a comment says why nothing is done
