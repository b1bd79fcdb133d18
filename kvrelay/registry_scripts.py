"""Lua that Redis runs atomically for `kvrelay.registry`. Junk in a key never stops a rightful writer."""

# KEYS: worker entry, epoch counter. ARGV: epoch, entry, ttl in ms. Returns the later epoch that is in the way, or nil.
# A live worker's epoch lifts the counter, so that numbers stay unique after Redis has lost it.
PUBLISH_WORKER = """
local old = redis.pcall('GET', KEYS[1])
if type(old) == 'string' then
  local ok, entry = pcall(cjson.decode, old)
  local value = ok and type(entry) == 'table' and entry.value
  local epoch = type(value) == 'table' and value.epoch
  if type(epoch) == 'number' and epoch > tonumber(ARGV[1]) then return epoch end
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[1]) then redis.call('SET', KEYS[2], ARGV[1]) end
"""

# KEYS: epoch counter. ARGV: number that it has to be above. Returns the number that is the caller's.
NEXT_EPOCH = """
local known = redis.pcall('GET', KEYS[1])
local number = math.max(type(known) == 'string' and tonumber(known) or 0, tonumber(ARGV[1])) + 1
redis.call('SET', KEYS[1], string.format('%d', number))
return number
"""

# KEYS: next numbers. ARGV: pool, least number. Returns the number that is the caller's.
NEXT_NAME = """
local known = redis.pcall('HGET', KEYS[1], ARGV[1])
local number = math.max(type(known) == 'string' and tonumber(known) or 0, tonumber(ARGV[2]))
if type(known) == 'table' and known.err then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d', number + 1))
return number
"""

# KEYS: worker entry. ARGV: epoch.
REMOVE_WORKER = """
local old = redis.pcall('GET', KEYS[1])
if type(old) ~= 'string' then return end
local ok, entry = pcall(cjson.decode, old)
local value = ok and type(entry) == 'table' and entry.value
if type(value) == 'table' and value.epoch == tonumber(ARGV[1]) then redis.call('DEL', KEYS[1]) end
"""

# KEYS: wanted sizes, token counter. ARGV: the leader's token, then for each pool its name, size before and size after.
# Returns 1 if written.
SCALE = """
if tonumber(redis.call('GET', KEYS[2]) or 0) > tonumber(ARGV[1]) then return 0 end
for i = 2, #ARGV, 3 do
  if redis.call('HGET', KEYS[1], ARGV[i]) ~= ARGV[i + 1] then return 0 end
end
for i = 2, #ARGV, 3 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
return 1
"""

# KEYS: leader, token counter. ARGV: owner, ttl in ms. Returns the owner's token, or nil while another leads.
ACQUIRE_LEADER = """
local leader = redis.pcall('HMGET', KEYS[1], 'owner', 'token')
local token = not leader.err and tonumber(leader[2])
if token and leader[1] == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return token
end
if token then return nil end
token = redis.call('INCR', KEYS[2])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'schema', 1, 'owner', ARGV[1], 'token', token)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return token
"""

# KEYS: leader. ARGV: owner.
RELEASE_LEADER = """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
