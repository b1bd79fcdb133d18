"""Lua scripts that Redis runs atomically for `kvrelay.state.registry`. An invalid value in a key
never blocks a legitimate writer.
"""

# Values that are not whole numbers, or too large to count exactly, become 0.
_NUMBER = """
local function number(value)
  local n = type(value) ~= 'table' and tonumber(value)
  return n and n >= 0 and n < 2 ^ 53 and n == math.floor(n) and n or 0
end
"""

# KEYS: worker entry, epoch counter, term counter, next numbers. ARGV: epoch, entry, ttl in ms, the
# term in which the worker was started, then role and number of its name; the role is empty for a
# name without a role. Returns the later epoch that blocks the write, or nil. The epochs, terms and
# names of live workers raise the counters, so that they stay unique after Redis has lost the
# counters.
PUBLISH_WORKER = (
    _NUMBER
    + """
local old = redis.pcall('GET', KEYS[1])
if type(old) == 'string' then
  local ok, entry = pcall(cjson.decode, old)
  local value = ok and type(entry) == 'table' and entry.value
  local epoch = type(value) == 'table' and number(value.epoch) or 0
  if epoch > number(ARGV[1]) then return epoch end
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
if number(redis.pcall('GET', KEYS[2])) < number(ARGV[1]) then
  redis.call('SET', KEYS[2], ARGV[1])
end
if number(redis.pcall('GET', KEYS[3])) < number(ARGV[4]) then
  redis.call('SET', KEYS[3], ARGV[4])
end
if ARGV[5] ~= '' and number(redis.pcall('HGET', KEYS[4], ARGV[5])) <= number(ARGV[6]) then
  redis.pcall('HSET', KEYS[4], ARGV[5], string.format('%d', number(ARGV[6]) + 1))
end
"""
)

# KEYS: epoch counter, leader. ARGV: two numbers that the epoch must exceed, then owner and term of
# the lease under which the worker was started; the owner is empty if there is no lease. Returns the
# new epoch, or 0 if another controller has led since.
NEXT_EPOCH = (
    _NUMBER
    + """
local leader = redis.pcall('HMGET', KEYS[2], 'owner', 'term')
if ARGV[3] ~= '' and not leader.err and leader[1] and leader[1] ~= ARGV[3]
    and number(leader[2]) >= number(ARGV[4]) then
  return 0
end
local known = number(redis.pcall('GET', KEYS[1]))
local epoch = math.max(known, number(ARGV[1]), number(ARGV[2])) + 1
redis.call('SET', KEYS[1], string.format('%d', epoch))
return epoch
"""
)

# KEYS: next numbers. ARGV: pool, least number. Returns the reserved number.
NEXT_NAME = (
    _NUMBER
    + """
local known = redis.pcall('HGET', KEYS[1], ARGV[1])
local next = math.max(number(known), number(ARGV[2]))
if type(known) == 'table' and known.err then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d', next + 1))
return next
"""
)

# KEYS: worker entry. ARGV: epoch.
REMOVE_WORKER = """
local old = redis.pcall('GET', KEYS[1])
if type(old) ~= 'string' then return end
local ok, entry = pcall(cjson.decode, old)
local value = ok and type(entry) == 'table' and entry.value
if type(value) == 'table' and value.epoch == tonumber(ARGV[1]) then redis.call('DEL', KEYS[1]) end
"""

# KEYS: leader, term counter. ARGV: owner, highest term that it has seen, then owner, term and beat
# of the record that it may replace. Renews the owner's lease, or takes a lease that is free or
# equals that record. A taken lease gets a term above all known terms. Returns the resulting lease:
# owner, term, beat.
RENEW_LEASE = (
    _NUMBER
    + """
local leader = redis.pcall('HMGET', KEYS[1], 'owner', 'term', 'beat')
local owner, term, beat = '', 0, 0
if not leader.err and type(leader[1]) == 'string' and number(leader[2]) > 0 then
  owner, term, beat = leader[1], number(leader[2]), number(leader[3])
end
local highest = math.max(number(redis.pcall('GET', KEYS[2])), number(ARGV[2]), term)
if owner ~= ARGV[1] then
  if owner ~= ''
      and not (owner == ARGV[3] and term == number(ARGV[4]) and beat == number(ARGV[5])) then
    return {owner, term, beat}
  end
  term, beat = highest + 1, 0
elseif highest > term then
  term = highest + 1
end
beat = beat + 1
redis.call('DEL', KEYS[1])
redis.call(
  'HSET', KEYS[1],
  'schema', 1, 'owner', ARGV[1], 'term', string.format('%d', term), 'beat', beat)
redis.call('SET', KEYS[2], string.format('%d', term))
return {ARGV[1], term, beat}
"""
)

# KEYS: leader. ARGV: owner.
RELEASE_LEASE = """
local owner = redis.pcall('HGET', KEYS[1], 'owner')
if owner == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

# KEYS: leader, then the keys of the script. ARGV: owner and term of the writer's lease, then the
# arguments of the script. Returns 0 unless the writer holds the lease.
_FENCE = """
local leader = redis.pcall('HMGET', KEYS[1], 'owner', 'term')
if leader.err or leader[1] ~= ARGV[1] or leader[2] ~= ARGV[2] then return 0 end
"""

# KEYS: leader, desired sizes. ARGV: owner, term, then for each pool its name, size before and size
# after. Returns 1 if written.
SCALE = (
    _FENCE
    + """
for i = 3, #ARGV, 3 do
  if redis.call('HGET', KEYS[2], ARGV[i]) ~= ARGV[i + 1] then return 0 end
end
for i = 3, #ARGV, 3 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2]) end
return 1
"""
)

# KEYS: leader, desired sizes. ARGV: owner, term, then for each pool its name and size. Returns 1 if
# written.
RESTORE_SIZES = (
    _FENCE
    + """
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return 1
"""
)

# KEYS: desired sizes, decisions. ARGV: index of the last decision to keep, number of pools, then
# for each pool its name and size, then decisions.
SET_SIZES = """
local sizes = 2 + 2 * tonumber(ARGV[2])
for i = 3, sizes, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
for i = sizes + 1, #ARGV do redis.call('LPUSH', KEYS[2], ARGV[i]) end
redis.call('LTRIM', KEYS[2], 0, ARGV[1])
"""

# KEYS: leader, decisions. ARGV: owner, term, decision, index of the last decision to keep. Returns
# 1 if written.
RECORD_DECISION = (
    _FENCE
    + """
redis.call('LPUSH', KEYS[2], ARGV[3])
redis.call('LTRIM', KEYS[2], 0, ARGV[4])
return 1
"""
)

_ADAPTER = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
local ok, entry = pcall(cjson.decode, old or '')
local value = ok and type(entry) == 'table' and entry.value
local known = type(value) == 'table'
local same = known and value.adapter_id == ARGV[2] and value.path == ARGV[3]
"""

# KEYS: adapters, channel of changes. ARGV: name, id and path of an adapter, entry, and 1 if the
# entry says that it is served. Returns 1 if the list has the entry now, or says already that it is
# served. An adapter is listed first and served later, so that none is served that was removed
# meanwhile. Never replaces an adapter with other files.
PUT_ADAPTER = (
    _ADAPTER
    + """
if known and not same or ARGV[5] == '1' and not same then return 0 end
if not same or not value.served then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[4])
  redis.call('PUBLISH', KEYS[2], 1)
end
return 1
"""
)

# KEYS: adapters, channel of changes. ARGV: name, id and path of an adapter. Removes the adapter
# unless the name has other files or is served.
WITHDRAW_ADAPTER = (
    _ADAPTER
    + """
if same and not value.served then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('PUBLISH', KEYS[2], 1)
end
"""
)
